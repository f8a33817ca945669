// Sums over the ranks of a device: see comm.go.

enum { MOST_RANKS = 64 };

// Ranks are the buffers of the ranks, and where their sum goes. Elements of T are added
// in S, and the sum is of D.
template <class T, class D> struct Ranks {
	const T *src[MOST_RANKS];
	D *dst[MOST_RANKS];
};

template <class T> DEVICE T value_of(T v) { return v; }
DEVICE float value_of(bf16 v) { return widen(v); }
DEVICE float value_of(f16 v) { return widen(v); }
template <class T> DEVICE void set_value(T *p, T v) { *p = v; }
DEVICE void set_value(bf16 *p, float v) { narrow(p, v); }
DEVICE void set_value(f16 *p, float v) { narrow(p, v); }

// read and write are of N elements that lie together.
template <int N, class S, class T> DEVICE void read(const T *p, S *v) {
	if constexpr (N > 1) get<N>(p, v);
	else v[0] = value_of(*p);
}
template <int N, class S, class T> DEVICE void write(T *p, const S *v) {
	if constexpr (N > 1) put<N>(p, v);
	else set_value(p, v[0]);
}

// RankAt reads the elements from i on of a rank.
template <int N, class S, class T, class D> struct RankAt {
	const Ranks<T, D> &r;
	i64 i;
	__device__ __forceinline__ void operator()(int k, S *v) const { read<N>(r.src[k] + i, v); }
};

// sum_ranks adds N elements in the order of comm.Adder: a binary tree over the rank,
// split at the largest power of two below the count.
template <int N, class S, class T> DEVICE void sum_ranks(S *waiting, const Ranks<T, T> &r, i64 i, int ranks, int outs, int accumulate) {
	S v[N], old[N];
	sum_tree<N>(waiting, ranks, RankAt<N, S, T, T>{r, i}, v);
#pragma unroll 1
	for (int o = 0; o < outs; o++) {
		if (accumulate) read<N>(r.dst[o] + i, old);
#pragma unroll
		for (int j = 0; j < N; j++) old[j] = accumulate ? old[j] + v[j] : v[j];
		write<N>(r.dst[o] + i, old);
	}
}

// packs are how many of n elements go by packs: all whole ones where all buffers lie at
// multiples of 16 bytes (aligned), or none.
#define SUM_RANKS(NAME, T, S) \
	KERNEL(TREE_THREADS, sum_ranks_##NAME, const int *skip, Ranks<T, T> r, i64 n, int ranks, int outs, int accumulate, int aligned) { \
		SKIP(); \
		DYNAMIC_SHARED(S, waiting); \
		const int N = 16 / sizeof(T); \
		const i64 packs = aligned ? n / N : 0; \
		STRIDED(i, packs) sum_ranks<N>(waiting, r, i * N, ranks, outs, accumulate); \
		STRIDED(i, n - packs * N) sum_ranks<1>(waiting, r, packs * N + i, ranks, outs, accumulate); \
	}
SUM_RANKS(f32, float, float)
SUM_RANKS(f64, double, double)
SUM_RANKS(i64, u64, u64)   // integer sums wrap
SUM_RANKS(bf16, bf16, float) // 16 bits are added in f32 and rounded once
SUM_RANKS(f16, f16, float)

// sum_leaves adds the ranks' elements from left to right in f32, from what is there on if
// accumulating; to one place.
template <int N, class T> DEVICE void sum_leaves(const Ranks<T, float> &r, i64 i, int ranks, int accumulate) {
	const RankAt<N, float, T, float> rank = {r, i};
	float v[N], old[N];
	rank(0, v);
	if (accumulate) {
		read<N>(r.dst[0] + i, old);
#pragma unroll
		for (int j = 0; j < N; j++) v[j] = old[j] + v[j];
	}
	sum_in_order<N>(ranks, rank, v);
	write<N>(r.dst[0] + i, v);
}

#define SUM_LEAVES(NAME, T) \
	KERNEL(TREE_THREADS, sum_leaves_##NAME, const int *skip, Ranks<T, float> r, i64 n, int ranks, int outs, int accumulate, int aligned) { \
		SKIP(); \
		const int N = 16 / sizeof(T); \
		const i64 packs = aligned ? n / N : 0; \
		STRIDED(i, packs) sum_leaves<N>(r, i * N, ranks, accumulate); \
		STRIDED(i, n - packs * N) sum_leaves<1>(r, packs * N + i, ranks, accumulate); \
	}
SUM_LEAVES(f32, float)
SUM_LEAVES(bf16, bf16)
SUM_LEAVES(f16, f16)
