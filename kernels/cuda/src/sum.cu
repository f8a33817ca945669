// Sums in double, with the CPU's bits: 256-element blocks in 16 lanes, combined
// by the tree that splits a range at the largest power of two below its length.

// half_sum adds the 16 lanes of half a warp in the order of package vec: lane l
// takes l+8, then l+4 …; the sum is lane 0's of the half.
DEVICE double half_sum(double v) {
	for (int h = 8; h > 0; h >>= 1) v += __shfl_down_sync(0xffffffffu, v, h, 16);
	return v;
}

// tree_sum adds n numbers in shared or global memory, in place. Adding neighbours
// pair by pair, an odd one out waiting for the next level, is that tree.
DEVICE double tree_sum(double *s, i64 n) {
	for (i64 step = 1; step < n; step *= 2) {
		__syncthreads();
		for (i64 i = threadIdx.x; (2 * i + 1) * step < n; i += blockDim.x) s[2 * i * step] += s[(2 * i + 1) * step];
	}
	__syncthreads();
	return n > 0 ? s[0] : 0;
}

// PIECE is the elements of a partial sum, BLOCK those of one expression.
#define PIECE 65536
#define BLOCK 256

// Every block of threads sums a piece.
#define SUM_PIECES(T) \
	KERNEL(256, sum_pieces_##T, const int *skip, const T *x, double *work, i64 n) { \
		SKIP(); \
		SHARED(double, sums, PIECE / BLOCK); \
		i64 from = (i64)blockIdx.x * PIECE; \
		i64 len = n - from < PIECE ? n - from : PIECE; \
		i64 blocks = (len + BLOCK - 1) / BLOCK; \
		int lane = threadIdx.x % 16; \
		for (i64 base = 0; base < blocks; base += blockDim.x / 16) { \
			i64 b = base + threadIdx.x / 16; \
			double s = 0; \
			for (i64 i = b * BLOCK + lane; i < (b + 1) * BLOCK && i < len; i += 16) s += (double)load(x + from + i); \
			s = half_sum(s); \
			if (lane == 0 && b < blocks) sums[b] = s; \
		} \
		double total = tree_sum(sums, blocks); \
		if (threadIdx.x == 0) work[blockIdx.x] = total; \
	}
FOR_FLOATS(SUM_PIECES)

// One block adds the pieces.
KERNEL(256, sum_total, const int *skip, double *work, double *y, i64 pieces, int accumulate) {
	SKIP();
	double total = tree_sum(work, pieces);
	if (threadIdx.x == 0) *y = accumulate ? total + *y : total;
}
