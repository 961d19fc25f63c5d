"""The bundle: an exported directory of tuned kernels. Reading one needs neither torch nor optuna.

Nothing is imported here: :mod:`.schema` is the format, :mod:`.reader` loads and finds, :mod:`.writer` writes.
"""
