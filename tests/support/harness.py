"""Files that EleutherAI's harness needs to run a small model without a network: tasks over a local file, and a gpt2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import ARCHITECTURE

DOCUMENTS = 9
CHOICES = "output_type: multiple_choice, doc_to_target: 0, metric_list: [{metric: acc}]"
ANSWERS = "output_type: generate_until, metric_list: [{metric: exact_match}]"
TASKS = {
    "small_choices": f'{CHOICES}, doc_to_text: "{{{{question}}}}", doc_to_choice: choices',
    # whose continuations are of one token, for which the harness runs one row
    "small_letters": f'{CHOICES}, doc_to_text: "{{{{question}}}} Answer:", doc_to_choice: [a, b, c, d]',
    "small_texts": 'output_type: loglikelihood_rolling, doc_to_text: "", doc_to_target: answer, '
    "metric_list: [{metric: byte_perplexity}]",
    "small_answers": f'{ANSWERS}, doc_to_text: "{{{{question}}}}", doc_to_target: answer, '
    r'generation_kwargs: {until: ["\n\n"]}',
    # generated in another way, so that the harness does not run them together
    "small_lines": f'{ANSWERS}, doc_to_text: "{{{{answer}}}}", doc_to_target: question, '
    r'generation_kwargs: {until: ["\n"], max_gen_toks: 300}',
}


def make_harness_inputs(folder: Path, inputs: Path) -> None:
    """Make ``folder/tasks``, for ``include_path``, and ``folder/gpt2``, which stock loads where it is launched."""
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, end: 1}, merges=[]))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=2, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    special = {"bos_token": end, "eos_token": end, "unk_token": end}
    for part in (model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)):
        part.save_pretrained(folder / "gpt2")
    samples = json.loads((inputs / "train.json").read_text())[:DOCUMENTS]
    answers = [sample["output"] for sample in samples]
    documents = []
    for number, sample in enumerate(samples):
        choices = [f" {answers[number - other][: 40 * (other + 1)]}" for other in range(3)]
        documents.append({"question": sample["instruction"], "answer": answers[number], "choices": choices})
    (folder / "tasks").mkdir()
    path = folder / "tasks" / "documents.json"
    path.write_text(json.dumps(documents))
    for name, task in TASKS.items():
        data = f"task: {name}, dataset_path: json, dataset_kwargs: {{data_files: {{test: {path}}}}}, test_split: test"
        (folder / "tasks" / f"{name}.yaml").write_text(f"{{{data}, {task}}}")


def task_manager(include_path: str) -> Any:
    """Return what finds tasks below a folder; to list the harness's own, which are thousands, takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=False)


def evaluation_config(folder: Path, inputs: Path) -> dict[str, Any]:
    """Return what to set in a config for evaluation, stock's or a new one, so that it runs on a CPU."""
    return {
        "output_dir": str(folder / "out"), "device": "cpu", "dtype": "fp32", "seed": 1234,
        "model": {"_component_": "torchtune.models.llama2.llama2", **ARCHITECTURE},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(inputs / "model"),
            "checkpoint_files": ["model.safetensors"], "output_dir": str(folder / "out"), "model_type": "LLAMA2",
        },
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer", "path": str(inputs / "tokenizer.model"),
            "max_seq_len": None,
        },
        "tasks": [*TASKS], "include_path": str(folder / "tasks"), "limit": None, "batch_size": 8, "quantizer": None,
        "max_seq_length": ARCHITECTURE["max_seq_len"], "enable_kv_cache": True,
    }  # fmt: skip
