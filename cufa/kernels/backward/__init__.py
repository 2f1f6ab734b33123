"""Backward kernels, each in the file with the stem of its folder in cuda_src/backward."""
