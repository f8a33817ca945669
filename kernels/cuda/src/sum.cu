// Sums in double, with the CPU's bits: blocks of 256 elements (sum_block), combined by the
// tree that splits a range at the largest power of two below its length.

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

#define PIECE 65536 // elements of a partial sum

struct ItselfOf { __device__ __forceinline__ double operator()(double x) const { return x; } };

// Every block of threads sums a piece.
#define SUM_PIECES(T) \
	KERNEL(256, sum_pieces_##T, const int *skip, const T *x, double *work, i64 n) { \
		SKIP(); \
		SHARED(double, sums, PIECE / BLOCK); \
		i64 from = (i64)blockIdx.x * PIECE; \
		const int len = n - from < PIECE ? (int)(n - from) : PIECE, blocks = (len + BLOCK - 1) / BLOCK; \
		const int threads = BLOCK_LANES / Pack<T>::N; /* of a block of elements */ \
		const bool packs = wide(x + from); \
		for (int base = 0; base < blocks; base += blockDim.x / threads) { \
			const int b = base + threadIdx.x / threads; \
			double s = sum_block(x + from, b * BLOCK, len, packs, ItselfOf()); \
			if (threadIdx.x % threads == 0 && b < blocks) sums[b] = s; \
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
// in the tree over their index.
template <int N, class S, class T> struct Part {
	const T *x; // of the first part
	i64 n;
	__device__ __forceinline__ void operator()(int k, S *v) const {
		if constexpr (N > 1) get<N>(x + k * n, v);
		else v[0] = at(x + k * n);
	}
	static __device__ __forceinline__ double at(const double *p) { return *p; }
	template <class U> static __device__ __forceinline__ float at(const U *p) { return load(p); }
};

// sum_parts adds N neighbouring elements of all parts.
template <int N, class S, class T> DEVICE void sum_parts(S *waiting, const T *x, S *y, i64 n, int parts, int sequential, int accumulate) {
	const Part<N, S, T> part = {x, n};
	S v[N];
	if (sequential) part(0, v);
	else sum_tree<N>(waiting, parts, part, v);
	if (accumulate) {
		S old[N];
		if constexpr (N > 1) get<N>(y, old);
		else old[0] = *y;
#pragma unroll
		for (int j = 0; j < N; j++) v[j] = old[j] + v[j];
	}
	if (sequential) sum_in_order<N>(parts, part, v);
	if constexpr (N > 1) put<N>(y, v);
	else *y = v[0];
}

#define SUM_PARTS(T, S) \
	KERNEL(TREE_THREADS, sum_parts_##T, const int *skip, const T *x, S *y, i64 n, i64 parts, int sequential, int accumulate) { \
		SKIP(); \
		DYNAMIC_SHARED(S, waiting); \
		const int N = 16 / sizeof(T); \
		const i64 packs = n % N == 0 && wide(x, y) ? n / N : 0; \
		STRIDED(i, packs) sum_parts<N>(waiting, x + i * N, y + i * N, n, (int)parts, sequential, accumulate); \
		if (!packs) \
			STRIDED(i, n) sum_parts<1>(waiting, x + i, y + i, n, (int)parts, sequential, accumulate); \
	}
typedef double f64;
SUM_PARTS(f32, float)
SUM_PARTS(bf16, float)
SUM_PARTS(f16, float)
SUM_PARTS(f64, double)
