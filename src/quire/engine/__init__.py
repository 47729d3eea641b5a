"""Between the doors and the core: requests become token ids, token ids become text. Imports no concrete backend."""
