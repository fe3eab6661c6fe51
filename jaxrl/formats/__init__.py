"""Files of weights and tokenizers to arrays, and back."""
