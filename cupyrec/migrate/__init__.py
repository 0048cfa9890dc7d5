"""Tables that other systems saved, a piece at a time; one file a system. See docs/migration.md.

Each reader is ``read(path, width, most, …)``: it yields ids (N,) int64, vectors (N, width) float32
and, by name, the optimizer's state of these rows (N, width), N being at most `most`.
"""
