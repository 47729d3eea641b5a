"""Models on the Hugging Face Hub: listing, choosing a variant, downloading, local files."""
