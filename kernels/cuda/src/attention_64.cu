// Attention of heads of up to 64 elements.
ATTENTION(64, 64, 64, 64, 64)
