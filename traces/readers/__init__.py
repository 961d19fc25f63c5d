"""One module a file format; each delivers a :class:`k3lab.traces.model.Trace`."""
