"""Names tables as data: which kernels of an engine belong to which family, one JSON file an engine."""
