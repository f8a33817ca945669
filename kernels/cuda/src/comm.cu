// Sums over the ranks of a device: see comm.go.

enum { MOST_RANKS = 64, SUM_LEVELS = 7, SUM_THREADS = 256 };

// Ranks are the buffers of the ranks, and where their sum goes.
template <class T> struct Ranks {
	const T *src[MOST_RANKS];
	T *dst[MOST_RANKS];
};

template <class T> DEVICE T value_of(T v) { return v; }
DEVICE float value_of(bf16 v) { return widen(v); }
DEVICE float value_of(f16 v) { return widen(v); }
template <class T> DEVICE void set_value(T *p, T v) { *p = v; }
DEVICE void set_value(bf16 *p, float v) { narrow(p, v); }
DEVICE void set_value(f16 *p, float v) { narrow(p, v); }

// tree_sum adds element i of n buffers in the order of comm.Adder: a binary tree
// over the rank, split at the largest power of two below the count. As a binary
// counter does, it joins neighbours of one size as they come, and what is left
// from the right.
// What waits lies in shared memory, of every thread its own.
template <class S, class T> DEVICE S tree_sum(S *waiting, const Ranks<T> &r, int n, i64 i) {
	S *part = waiting + threadIdx.x;
	int top = 0;
#pragma unroll 1
	for (int k = 0; k < n; k++) {
		S v = value_of(r.src[k][i]);
		for (int m = k + 1; !(m & 1); m >>= 1) v = part[--top * SUM_THREADS] + v;
		part[top++ * SUM_THREADS] = v;
	}
	S v = part[--top * SUM_THREADS];
	while (top > 0) v = part[--top * SUM_THREADS] + v;
	return v;
}

// sum_ranks adds elements of T in S.
template <class S, class T> DEVICE void sum_ranks(const Ranks<T> &r, i64 n, int ranks, int outs, int accumulate) {
	SHARED(S, waiting, SUM_LEVELS * SUM_THREADS);
	STRIDED(i, n) {
		S v = tree_sum<S>(waiting, r, ranks, i);
		for (int o = 0; o < outs; o++) set_value(&r.dst[o][i], accumulate ? value_of(r.dst[o][i]) + v : v);
	}
}

KERNEL(SUM_THREADS, sum_ranks_f32, const int *skip, Ranks<float> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks<float>(r, n, ranks, outs, accumulate);
}

KERNEL(SUM_THREADS, sum_ranks_f64, const int *skip, Ranks<double> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks<double>(r, n, ranks, outs, accumulate);
}

// Integer sums wrap, so they are of unsigned numbers.
KERNEL(SUM_THREADS, sum_ranks_i64, const int *skip, Ranks<u64> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks<u64>(r, n, ranks, outs, accumulate);
}

// Leaves are the buffers of the ranks, and where their sum goes: one place.
template <class T> struct Leaves {
	const T *src[MOST_RANKS];
	float *dst[MOST_RANKS];
};

// leaf_sum adds the ranks' elements from left to right in f32, from what is there on if
// accumulating.
template <class T> DEVICE void leaf_sum(const Leaves<T> &r, i64 n, int ranks, int accumulate) {
	STRIDED(i, n) {
		float v = value_of(r.src[0][i]);
		if (accumulate) v = r.dst[0][i] + v;
#pragma unroll 1
		for (int k = 1; k < ranks; k++) v = v + value_of(r.src[k][i]);
		r.dst[0][i] = v;
	}
}

#define SUM_LEAVES(NAME, T) \
	KERNEL(SUM_THREADS, sum_leaves_##NAME, const int *skip, Leaves<T> r, i64 n, int ranks, int outs, int accumulate) { \
		SKIP(); \
		leaf_sum(r, n, ranks, accumulate); \
	}
SUM_LEAVES(f32, float)
SUM_LEAVES(bf16, bf16)
SUM_LEAVES(f16, f16)

// 16 bits are added in f32 and rounded once.
KERNEL(SUM_THREADS, sum_ranks_bf16, const int *skip, Ranks<bf16> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks<float>(r, n, ranks, outs, accumulate);
}

KERNEL(SUM_THREADS, sum_ranks_f16, const int *skip, Ranks<f16> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks<float>(r, n, ranks, outs, accumulate);
}
