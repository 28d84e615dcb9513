"""Names of other packages that are private, replaced, or set for the whole process, and what needs each.

The first place to look when a name is gone. Checked with torch 2.13 and torchtune 0.6.1. Importing this package touches
none of torch's private names; where one is missing, the feature that needs it is refused or does without, and all
others work.
"""

PRIVATE = {
    # A plan, and a check of a config
    "torch.testing._internal.distributed.fake_pg.FakeStore": "stands for the other ranks",
    # A plain step
    "torch.nn.modules.batchnorm._BatchNorm": "knows what computes over a batch before it runs",
    "torch.utils._pytree.tree_leaves": "finds the tensors that a module returns",
    "torch.utils._pytree.tree_map": "moves a batch to the device",
    # A dry run
    "torch._C._current_graph_task_id": "tells whether a backward pass runs",
    "torch.autograd.Variable._execution_engine": "calls back at the end of a backward pass",
    "torch._C._current_autograd_node": "tells which part of the backward pass runs",
    "torch.distributed._tools.common_utils.get_untyped_storages": "finds the storages of a tensor subclass",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees each operation",
    "torch.utils._pytree.tree_flatten": "takes arguments of operations apart",
    "torch.utils._pytree.tree_map_only": "takes values of arguments to the host",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "tells which samples a batch is made of",
    "torch.autograd._engine_run_backward": "counts backward passes",
    "torch._C._cuda_attach_out_of_memory_observer": "tells of an allocation that fails, from within it",
    "torch._C._cuda_resetPeakMemoryStats": "forgets peaks, which are kept before",
    "torch.cuda._lazy_call": "begins when the script first asks for the device",
    "torch.cuda.memory._snapshot": "has the allocator's history",
    "torch._C._autograd": "has the numbers of autograd's nodes",
    "torch._C._autograd._get_sequence_nr": "tells which line a part of the backward pass belongs to",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "knows what an operation of a library is made of",
    "torch._ops": "has the class of operations",
    # Recipes
    "torch._dynamo": "has the number of sizes that are compiled",
    "torch.cuda.memory._record_memory_history": "records allocations, for stock's profiler and a dry run",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "knows checkpointed layers",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "lets a rank issue collectives for others",
    "torchtune.models.gemma2._attention.Gemma2Attention": "caps its scores, so that it runs sample by sample in a row",
    "torchtune._cli.run.Run": "is a command that is extended",
    "torchtune._recipe_registry": "lists recipes and configs",
    "torchtune.config._errors.ConfigError": "is raised for components that do not take their arguments",
    "torchtune.config._errors.InstantiationError": "is raised for a component that cannot be made",
    "torchtune.config._utils._merge_yaml_and_cli_args": "reads overrides as tune run does",
    "torchtune.generation._generation": "has the function that draws a token",
    "torchtune.training.checkpointing._checkpoint_client.TrainingProgress": "is what a checkpoint client stores",
    "torchtune.training.checkpointing._utils": "has the function that names a folder of checkpoints",
    "torchtune.training.checkpointing._utils.RECIPE_STATE_DIRNAME": "is the folder of the recipe's state",
    "torchtune.utils._import_guard": "knows whether packed data take flex attention",
}
"""Dotted name -> what it is needed for."""

REPLACED = {
    # While a recipe is set up, trains or saves; ``replaced_in`` (``_torchtune/stock/loading.py``) puts each back.
    "torchtune.training.register_optim_in_bwd_hooks": "has optimizers wait for the last micro-batch of a step",
    "torchtune.training.get_memory_stats": "is asked of a CPU by distributed recipes, where it fails",
    "torchtune.training.log_memory_stats": "logs them",
    "torchtune.training.get_distributed_backend": "names gloo twice where an optimizer is offloaded on a CPU",
    "torchtune.training.checkpointing._utils.get_largest_iter_folder": "names the folder that adapters come from",
    "torchtune.generation._generation.generate_next_token": "draws the same tokens however a rollout is split",
    # While a part runs whose samples lie end to end; ``RowSeams`` (``_torchtune/stock/end_to_end.py``) puts each back.
    "torchtune.modules.attention_utils._sdpa_or_flex_attention": "makes what attention calls: it stays within a sample",
    "torchtune.modules.TransformerDecoder._validate_inputs": "holds a sample, and not a row, against max_seq_len",
    "torchtune.modules.MultiHeadAttention": "has ``num_kv_heads`` set, as if no heads shared keys: they are not copied",
    "torchtune.modules.TransformerDecoder.unembed": "makes logits of those tokens alone that predict a target",
    "torchtune.modules.RotaryPositionalEmbeddings.forward": "looks up the angles of a row once for all layers",
    "torchtune.models.gemma2._attention.Gemma2Attention.forward": "runs on each sample by itself",
    # While a row of samples runs in a Trainer, and while it is looked at which models compute it as they do its samples
    "transformers.AttentionInterface._global_mapping": "has attention within samples, under a name",
    "transformers.PretrainedConfig._attn_implementation": "is that name, in all configs of the model",
    "transformers.masking_utils.AttentionMaskInterface._global_mapping": "tells what masks layers ask for",
}
"""Dotted name -> why it is replaced, for as long as a context is open."""

PROCESS_WIDE = {
    # While a run lasts
    "gc.freeze": "keeps what torch has made out of the collections of a probe and of a recovery",
    "resource.RLIMIT_DATA": "is the memory_limit of a run on a CPU",
    "torch.cuda.set_per_process_memory_fraction": "is the memory_limit of a run on CUDA",
    "torch._dynamo.config.recompile_limit": "lets flex attention be compiled for more sizes of packs",
    # Of a process that is ours: one that trains, or the command line
    "torchtune._recipe_registry._ALL_RECIPES": "has the recipes and configs of this package",
    "logging filter of torchao, warnings.filters": "keep messages off that a user can do nothing about",
    "sys.argv, PYTHONPATH": "are what a recipe is launched with",
    "TQDM_DISABLE, HF_DATASETS_DISABLE_PROGRESS_BARS": "hide progress bars, by -q",
    "logging.disable": "is set by -q",
    "torch.distributed.init_process_group": "makes no other group where a plan stands for one of many ranks",
    # Of a process of somebody's script in a dry run, which is there for nothing else
    "torch._C._cuda_resetPeakMemoryStats": "keeps peaks that are about to be forgotten",
    "torch.cuda.CUDAGraph.capture_begin, capture_end, replay": "count steps, and tell what a graph asks for",
    "torch._inductor.runtime.triton_heuristics.CachingAutotuner.run": "tells which compiled kernels a step asks for",
    "triton.runtime.jit.JITFunction.run": "tells which kernels of Triton a step asks for",
    # To the end of the process: glibc and oneDNN cannot tell what was set before, and read it once
    "mallopt, ONEDNN_PRIMITIVE_CACHE_CAPACITY, LRU_CACHE_CAPACITY": "let a CPU with a limit keep less for later",
}
"""Setting -> why. A run undoes its own when it ends, even in an error; ``tests/test_patches.py`` holds that."""
