"""The OpenAI API: what a body may hold (`schemas`), what it means (`fields`), which bytes are sent (`writer`)."""
