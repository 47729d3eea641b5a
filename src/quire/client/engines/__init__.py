"""The classes through which callers use a model that runs in this process or in a worker process."""
