"""The architecture of record in torch: weights, vocabulary, Llama. For cloud and trainers."""
