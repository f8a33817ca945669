// Attention of heads of up to 256 elements.
ATTENTION(256, 32, 32, 16, 16)
