// Attention of heads of up to 32 elements.
ATTENTION(32, 64, 64, 64, 64)
