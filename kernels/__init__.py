"""CUDA sources of the ops, installed as ``cupyrec.kernels``: one ``x.cu`` for each ``ops/x.py``."""
