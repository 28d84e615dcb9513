"""A CUDA device that has memory and no processors, on which a CUDA build of torch runs where there is no GPU.

torch's caching allocator, its out-of-memory errors, streams, FSDP2 over NCCL, Inductor and Triton are the real ones.
What a GPU computes is missing: kernels and matrix products are counted and return at once. A library of C++ (`source/`)
stands in front of CUDA's runtime and driver, cuBLAS and NCCL; `build` compiles it and says how a program starts on it,
and `control` is for that program: counters, neighbours and faults.
"""
