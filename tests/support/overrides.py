"""Settings that tests of several kinds of run share, as the command line takes them."""

SGD = ["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1"]  # Adam makes rounding as large as its step
WIDE = ["model.embed_dim=128", "model.intermediate_dim=256", "checkpointer.checkpoint_dir=${data_dir}/wide"]
"""A model whose layers fill the blocks of 4-bit weights, and whose activations show among what a process has in use"""

RECOVER = ["adaptive_batching.recover_from_oom=True"]
"""Our loop, with no field that changes what a step does"""

TEACHER = [
    "teacher_model._component_=torchtune.models.llama2.llama2", "kd_ratio=0.5",
    *(f"teacher_model.{key}=${{model.{key}}}" for key in (
        "vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "max_seq_len",
    )),
    "teacher_checkpointer._component_=torchtune.training.FullModelHFCheckpointer",
    "teacher_checkpointer.checkpoint_dir=${data_dir}/teacher", "teacher_checkpointer.output_dir=${output_dir}",
    "teacher_checkpointer.checkpoint_files=[model.safetensors]", "teacher_checkpointer.model_type=LLAMA2",
    "kd_loss._component_=torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
]  # fmt: skip
DOUBLE = ["batch_increase_function._component_=adaptive_batching.growth.step", "batch_increase_function.every=1"]
VALIDATE = [
    "dataset_val._component_=torchtune.datasets.instruct_dataset", "dataset_val.source=json",
    "dataset_val.data_files=${data_dir}/train.json", "dataset_val.column_map=${dataset.column_map}",
    "dataset_val.split=train[60:71]", "dataset_val.train_on_input=True",
]  # fmt: skip
"""Eleven samples to validate on: neither batches of four nor two ranks divide them, and each has a label more than it
has targets."""
