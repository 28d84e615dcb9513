"""Names of other packages that are private to them, and what here needs each: the first place to look when one is gone.

Checked with torch 2.13 and torchtune 0.6.1. Importing this package touches none of torch's; where
one is missing, the feature that needs it is refused or does without, and all others work. Functions of torchtune that
recipes call are replaced by ``replaced_in_torchtune`` (``_torchtune/stock.py``), for as long as its context is open.
"""

PRIVATE = {
    # A trace: without one, the largest batch is searched by measured steps.
    "torch._C._current_graph_task_id": "tells whether a backward pass runs",
    "torch._inductor.decomposition.select_decomp_table": "splits a compiled layer as AOTAutograd does",
    "torch._subclasses.fake_tensor.FakeCopyMode": "copies a model without its memory",
    "torch._subclasses.fake_tensor.FakeTensor": "knows what has no memory",
    "torch._subclasses.fake_tensor.FakeTensorMode": "runs a step without memory",
    "torch.autograd.Variable._execution_engine": "calls back at the end of a backward pass",
    "torch.distributed._tools.common_utils.get_untyped_storages": "finds the storages of a tensor subclass",
    "torch.nn.utils.stateless._reparametrize_module": "calls a layer with other parameters",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees each operation",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "knows quantized weights and sharded ones",
    "torch.utils._pytree.tree_flatten": "takes arguments of operations apart",
    "torch.utils._pytree.tree_iter": "takes results of operations apart",
    "torch.utils._pytree.tree_map_only": "takes the step's arguments to the fake mode",
    "torch.utils._pytree.tree_unflatten": "puts results of a compiled layer together",
    "torch._C._current_autograd_node": "follows offloaded activations, in a trace",
    "torch._C._storage_Use_Count": "follows offloaded activations, in a trace",
    # A plan
    "torch.nn.modules.module._IncompatibleKeys": "is what loading weights returns",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "stands for the other ranks",
    "torchtune.training._activation_offloading": "has the offloading that a traced one stands for",
    # A plain step
    "torch.nn.modules.batchnorm._BatchNorm": "knows what computes over a batch before it runs",
    "torch.utils._pytree.tree_leaves": "finds the tensors that a module returns",
    "torch.utils._pytree.tree_map": "moves a batch to the device",
    # Recipes
    "torch._dynamo": "has the number of sizes that are compiled",
    "torch.cuda.memory._record_memory_history": "records allocations for the profiler, as stock does",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "knows checkpointed layers",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": "lets a rank issue collectives for others; see can_drain",
    "torchtune._cli.cat.Cat": "is a command that is extended",
    "torchtune._cli.cp.Copy": "is a command that is extended",
    "torchtune._cli.ls.List": "is a command that is extended",
    "torchtune._cli.run.Run": "is a command that is extended",
    "torchtune._cli.validate.Validate": "is a command that is extended",
    "torchtune._recipe_registry": "lists recipes and configs",
    "torchtune.config._errors.InstantiationError": "is raised for a component that cannot be made",
    "torchtune.config._utils._merge_yaml_and_cli_args": "reads overrides as tune run does",
    "torchtune.generation._generation": "has the function that draws a token",
    "torchtune.training.checkpointing._checkpoint_client.TrainingProgress": "is what asynchronous checkpoints store",
    "torchtune.training.checkpointing._utils": "has the function that names a folder of checkpoints",
    "torchtune.training.checkpointing._utils.RECIPE_STATE_DIRNAME": "is the folder of the recipe's state",
    "torchtune.utils._import_guard": "knows whether packed data take flex attention",
}
"""Dotted name -> what it is needed for."""
