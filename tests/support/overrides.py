"""Settings that tests of several kinds of run share, as the command line takes them."""

SGD = ["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1"]  # Adam makes rounding as large as its step
DOUBLE = [
    "batch_increase_function._component_=adaptive_batching.growth.step",
    "batch_increase_function.every=1",
]
