# What nanobind's stub generator leaves out.
_core.__prefix__:
    __version__: str
