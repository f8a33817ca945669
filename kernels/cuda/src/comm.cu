// Sums over the ranks of a device: see comm.go.

enum { MOST_RANKS = 64 };

// Ranks are the buffers of the ranks, and where their sum goes.
template <class T> struct Ranks {
	const T *src[MOST_RANKS];
	T *dst[MOST_RANKS];
};

// tree_sum adds element i of n buffers in the order of comm.Adder: a binary tree
// over the rank, split at the largest power of two below the count. As a binary
// counter does, it joins neighbours of one size as they come, and what is left
// from the right.
template <class T> DEVICE T tree_sum(const Ranks<T> &r, int n, i64 i) {
	T part[7];
	int top = 0;
	for (int k = 0; k < n; k++) {
		T v = r.src[k][i];
		for (int m = k + 1; !(m & 1); m >>= 1) v = part[--top] + v;
		part[top++] = v;
	}
	T v = part[--top];
	while (top > 0) v = part[--top] + v;
	return v;
}

template <class T> DEVICE void sum_ranks(const Ranks<T> &r, i64 n, int ranks, int outs, int accumulate) {
	for (i64 i = first(); i < n; i += stride()) {
		T v = tree_sum(r, ranks, i);
		for (int o = 0; o < outs; o++) r.dst[o][i] = accumulate ? r.dst[o][i] + v : v;
	}
}

KERNEL(256, sum_ranks_f32, const int *skip, Ranks<float> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks(r, n, ranks, outs, accumulate);
}

KERNEL(256, sum_ranks_f64, const int *skip, Ranks<double> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks(r, n, ranks, outs, accumulate);
}

// Integer sums wrap, so they are of unsigned numbers.
KERNEL(256, sum_ranks_i64, const int *skip, Ranks<u64> r, i64 n, int ranks, int outs, int accumulate) {
	SKIP();
	sum_ranks(r, n, ranks, outs, accumulate);
}
