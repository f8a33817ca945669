// Attention of heads of up to 128 elements.
ATTENTION(128, 64, 64, 32, 32)
