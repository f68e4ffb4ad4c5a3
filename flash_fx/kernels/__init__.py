"""From a program and static facts to Triton kernels and their launches."""
