"""A folder for `PYTHONPATH`: its `sitecustomize` starts the recording of Python processes under `spanmill run`."""
