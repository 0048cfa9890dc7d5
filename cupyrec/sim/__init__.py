"""CUDA kernels without a GPU: NVRTC's PTX executed, checked and counted, thread by thread."""
