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

// Parts that lie one after another, added element by element: from left to right, or
// in the tree over their index. As a binary counter does, that joins neighbours of one
// size as they come, and what is left from the right.
DEVICE double part_at(const double *p) { return *p; }
template <class T> DEVICE float part_at(const T *p) { return load(p); }

enum { PART_LEVELS = 18, PART_THREADS = 256 }; // levels of a tree over 2^16 parts and more

// The levels lie in shared memory, of every thread its own: a thread's registers have
// no index.
template <class S, class T> DEVICE S tree_of_parts(S *levels, const T *x, i64 i, i64 n, i64 parts) {
	S *part = levels + threadIdx.x;
	int top = 0;
#pragma unroll 1
	for (i64 k = 0; k < parts; k++) {
		S v = part_at(x + k * n + i);
		for (i64 m = k + 1; !(m & 1); m >>= 1) v = part[--top * PART_THREADS] + v;
		part[top++ * PART_THREADS] = v;
	}
	S v = part[--top * PART_THREADS];
	while (top > 0) v = part[--top * PART_THREADS] + v;
	return v;
}

template <class S, class T> DEVICE S parts_in_order(S v, const T *x, i64 i, i64 n, i64 parts) {
#pragma unroll 1
	for (i64 k = 1; k < parts; k++) v = v + part_at(x + k * n + i);
	return v;
}

#define SUM_PARTS(T, S) \
	KERNEL(PART_THREADS, sum_parts_##T, const int *skip, const T *x, S *y, i64 n, i64 parts, int sequential, int accumulate) { \
		SKIP(); \
		SHARED(S, levels, PART_LEVELS * PART_THREADS); \
		STRIDED(i, n) { \
			S v = part_at(x + i); \
			if (!sequential) v = tree_of_parts<S>(levels, x, i, n, parts); \
			if (accumulate) v = y[i] + v; \
			if (sequential) v = parts_in_order(v, x, i, n, parts); \
			y[i] = v; \
		} \
	}
typedef double f64;
SUM_PARTS(f32, float)
SUM_PARTS(bf16, float)
SUM_PARTS(f16, float)
SUM_PARTS(f64, double)
