"""Models of the Hugging Face hub: listing, variants, files, download."""
