// Layer norm and RMS norm. A block takes a row; a thread takes quads of columns,
// the same ones whether they are read 16 bytes at a time or not, so that the bits
// depend on the width alone. Statistics take two passes in f32, over what the first
// reading kept in shared memory.

// Row is a row of values whose quads threads share out.
template <class T> struct Row {
	T *at;
	bool packs;
	// Rows of values that packs of 16 bytes hold whole are read and written by quads.
	__device__ __forceinline__ Row(T *base, i64 row, i64 cols) : at(base + row * cols), packs(cols % 4 == 0 && quads(base)) {}
	// read reads columns c to c+3, 0 beyond the row.
	__device__ __forceinline__ void read(i64 c, i64 cols, float *v) const {
		if (packs) {
			get<4>(at + c, v);
			return;
		}
		for (int j = 0; j < 4; j++) v[j] = c + j < cols ? load(at + c + j) : 0.0f;
	}
	// write writes or accumulates them.
	__device__ __forceinline__ void write(i64 c, i64 cols, float *v, int accumulate) const {
		if (packs) {
			float old[4];
			if (accumulate) {
				get<4>(at + c, old);
				for (int j = 0; j < 4; j++) v[j] = old[j] + v[j];
			}
			put<4>(at + c, v);
			return;
		}
		for (int j = 0; j < 4; j++)
			if (c + j < cols) store(at + c + j, v[j], accumulate);
	}
};

#define QUADS(c, cols) _Pragma("unroll 1") for (i64 c = 4 * (i64)threadIdx.x; c < cols; c += 4 * (i64)blockDim.x)

// Kept is what a thread reads or makes once and needs again: its quads, in the
// block's dynamic shared memory where a row has room there (keep). Each thread reads
// back what it wrote itself.
struct Kept {
	float *at;
	int keep;
	__device__ __forceinline__ void put(i64 c, const float *v) const {
		if (keep) put_shared<4>(at + c, v);
	}
	// get says whether it had them.
	__device__ __forceinline__ bool get(i64 c, float *v) const {
		if (keep) ::get<4>(at + c, v);
		return keep;
	}
};

// as_stored is what an element of a type is once it is stored.
template <class T> DEVICE float as_stored(float x) {
	T h;
	narrow(&h, x);
	return widen(h);
}

// What a norm is taken of: a row of x, or of the sum of two, which it stores. first is a
// thread's first reading of its quads, again any other.
template <class T> struct Stored {
	const Row<const T> x;
	__device__ __forceinline__ Stored(const T *x, i64 n, i64 cols) : x(x, n, cols) {}
	__device__ __forceinline__ void first(i64 c, i64 cols, float *v) const { x.read(c, cols, v); }
	__device__ __forceinline__ void again(i64 c, i64 cols, float *v) const { x.read(c, cols, v); }
};

template <class T> struct Summed {
	const Row<const T> a, b;
	const Row<T> sum;
	__device__ __forceinline__ Summed(const T *a, const T *b, T *sum, i64 n, i64 cols) : a(a, n, cols), b(b, n, cols), sum(sum, n, cols) {}
	__device__ __forceinline__ void first(i64 c, i64 cols, float *v) const {
		float w[4];
		a.read(c, cols, v);
		b.read(c, cols, w);
		for (int j = 0; j < 4; j++) v[j] = as_stored<T>(v[j] + w[j]);
		sum.write(c, cols, v, 0);
	}
	__device__ __forceinline__ void again(i64 c, i64 cols, float *v) const {
		if (sum.packs) {
			get<4>(sum.at + c, v);
			return;
		}
		for (int j = 0; j < 4; j++) v[j] = c + j < cols ? load(sum.at + c + j) : 0.0f;
	}
};

template <class T, class In> DEVICE void layernorm(const In row, const T *gamma, const T *beta, T *y, float *mean, float *rstd, i64 cols, float eps, int keep) {
	SHARED(float, partial, 32);
	DYNAMIC_SHARED(float, dynamic);
	const Kept kept = {dynamic, keep};
	const i64 n = blockIdx.x;
	Row<const T> g(gamma, 0, cols), b(beta, 0, cols);
	float v[4], w[4], z[4], s = 0;
	QUADS(c, cols) {
		row.first(c, cols, v);
		kept.put(c, v);
		for (int j = 0; j < 4; j++) s += v[j];
	}
	float m = block_sum(s, partial) / (float)cols;
	s = 0;
	QUADS(c, cols) {
		if (!kept.get(c, v)) row.again(c, cols, v);
		for (int j = 0; j < 4; j++) {
			float d = c + j < cols ? v[j] - m : 0.0f;
			s = fma_(d, d, s);
		}
	}
	float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	const Row<T> out(y, n, cols);
	QUADS(c, cols) {
		if (!kept.get(c, v)) row.again(c, cols, v);
		g.read(c, cols, w);
		b.read(c, cols, z);
		for (int j = 0; j < 4; j++) v[j] = fma_((v[j] - m) * r, w[j], z[j]);
		out.write(c, cols, v, 0);
	}
	if (threadIdx.x == 0) mean[n] = m, rstd[n] = r;
}

template <class T, class In> DEVICE void rmsnorm(const In row, const T *gamma, T *y, float *rstd, i64 cols, float eps, int keep) {
	SHARED(float, partial, 32);
	DYNAMIC_SHARED(float, dynamic);
	const Kept kept = {dynamic, keep};
	const i64 n = blockIdx.x;
	Row<const T> g(gamma, 0, cols);
	float v[4], w[4], s = 0;
	QUADS(c, cols) {
		row.first(c, cols, v);
		kept.put(c, v);
		for (int j = 0; j < 4; j++) s = fma_(v[j], v[j], s);
	}
	float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	const Row<T> out(y, n, cols);
	QUADS(c, cols) {
		if (!kept.get(c, v)) row.again(c, cols, v);
		g.read(c, cols, w);
		for (int j = 0; j < 4; j++) v[j] = v[j] * r * w[j];
		out.write(c, cols, v, 0);
	}
	if (threadIdx.x == 0) rstd[n] = r;
}

// The gradient by x. With h = (x-mean)·rstd and g = dy·gamma: dx =
// rstd·(g - Σg/C - h·Σ(g·h)/C); an RMS norm has no mean and no Σg.
template <class T> struct NormGrad {
	Row<const T> row, grad, gain;
	bool centred;
	float m, r;

	__device__ __forceinline__ void read(i64 c, i64 cols, float *h, float *g) const {
		float v[4], d[4], w[4];
		row.read(c, cols, v);
		grad.read(c, cols, d);
		gain.read(c, cols, w);
		for (int j = 0; j < 4; j++) h[j] = centred ? (v[j] - m) * r : v[j] * r, g[j] = d[j] * w[j];
	}
};

template <class T> DEVICE void norm_dx(const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, i64 cols, int accumulate, int keep) {
	SHARED(float, partial, 32);
	DYNAMIC_SHARED(float, dynamic);
	const Kept hs = {dynamic, keep}, gs = {dynamic + (cols + 3) / 4 * 4, keep};
	const i64 n = blockIdx.x;
	const NormGrad<T> in = {Row<const T>(x, n, cols), Row<const T>(dy, n, cols), Row<const T>(gamma, 0, cols), mean != 0, mean ? mean[n] : 0.0f, rstd[n]};
	float h[4], g[4], s1 = 0, s2 = 0;
	QUADS(c, cols) {
		in.read(c, cols, h, g);
		hs.put(c, h), gs.put(c, g);
		for (int j = 0; j < 4; j++) {
			if (c + j >= cols) break;
			s1 += g[j];
			s2 = fma_(g[j], h[j], s2);
		}
	}
	float m1 = mean ? block_sum(s1, partial) / (float)cols : 0.0f;
	float m2 = block_sum(s2, partial) / (float)cols;
	const Row<T> out(dx, n, cols);
	QUADS(c, cols) {
		if (!hs.get(c, h) || !gs.get(c, g)) in.read(c, cols, h, g);
		for (int j = 0; j < 4; j++) h[j] = in.r * fma_(-h[j], m2, mean ? g[j] - m1 : g[j]);
		out.write(c, cols, h, accumulate);
	}
}

// The gradients by gain and shift: dgamma = Σ dy·h, dbeta = Σ dy over rows. Lane l of
// lanes takes rows l, l+lanes, … in order; the lanes' sums are added by a fixed tree, by a
// second kernel. How many lanes there are depends on the type alone, and so do the bits.
//
// A block is a warp: a lane's rows of 64 columns, two a thread. Such a sum is a chain, and
// there are few. So its rows come by asynchronous copies into shared memory that the thread
// alone reads, RING - GROUP of them at least under way: at 768 columns of 16 bits, 42 KB on
// each of 132 multiprocessors.
enum { RING = 32, GROUP = 4, LANE_COLUMNS = 64 };

template <class T> struct alignas(16) Ring {
	T dy[RING][LANE_COLUMNS], x[RING][LANE_COLUMNS];
	float mean[RING][32], rstd[RING][32]; // of the row, for each thread
};

// pair reads two elements that lie together.
DEVICE void pair(const float *p, float *v) {
	const Words<2> u = Words<2>::at(p);
	v[0] = of_bits(u.w[0]), v[1] = of_bits(u.w[1]);
}
DEVICE void pair(const bf16 *p, float *v) {
	const u32 w = *(const u32 *)p;
	v[0] = of_bits(w << 16), v[1] = of_bits(w & 0xffff0000u);
}
DEVICE void pair(const f16 *p, float *v) {
	const u32 w = *(const u32 *)p;
	v[0] = f16_at(w), v[1] = f16_at(w >> 16);
}

// Lane is a lane's rows of two columns: where the next row to fetch lies, and how many there
// are yet. GAIN: dgamma is asked for; CENTRED: there is a mean.
template <class T, bool GAIN, bool CENTRED> struct Lane {
	const T *dy, *x;
	const float *mean, *rstd;
	i64 step; // from row to row, elements
	int lanes, left;

	__device__ __forceinline__ void fetch(Ring<T> *r, int place) {
		const int t = threadIdx.x, BYTES = 2 * sizeof(T);
		if (left-- > 0) {
			copy_async<BYTES>(&r->dy[place][2 * t], dy, true);
			if (GAIN) copy_async<BYTES>(&r->x[place][2 * t], x, true), copy_async<4>(&r->rstd[place][t], rstd, true);
			if (GAIN && CENTRED) copy_async<4>(&r->mean[place][t], mean, true);
		}
		dy += step;
		if (GAIN) x += step, rstd += lanes;
		if (GAIN && CENTRED) mean += lanes;
	}
	static __device__ __forceinline__ void add(const Ring<T> *r, int place, float *gains, float *shifts) {
		const int t = threadIdx.x;
		float d[2], v[2];
		pair(&r->dy[place][2 * t], d);
		shifts[0] += d[0], shifts[1] += d[1];
		if (!GAIN) return;
		pair(&r->x[place][2 * t], v);
		const float m = CENTRED ? r->mean[place][t] : 0.0f, s = r->rstd[place][t];
#pragma unroll
		for (int j = 0; j < 2; j++) gains[j] += d[j] * ((CENTRED ? v[j] - m : v[j]) * s);
	}
	// sums adds count rows, as many as any thread has.
	__device__ __forceinline__ void sums(Ring<T> *r, int count, float *gains, float *shifts) {
#pragma unroll 1
		for (int place = 0; place < RING; place += GROUP) {
#pragma unroll
			for (int k = 0; k < GROUP; k++) fetch(r, place + k);
			commit_copies();
		}
		int place = 0;
#pragma unroll 1
		for (; count > 0; count -= GROUP) {
			wait_copies<RING / GROUP - 1>();
			if (count >= GROUP)
#pragma unroll
				for (int k = 0; k < GROUP; k++) add(r, place + k, gains, shifts);
			else
#pragma unroll 1
				for (int k = 0; k < count; k++) add(r, place + k, gains, shifts);
			__syncwarp(); // read before it is overwritten
#pragma unroll
			for (int k = 0; k < GROUP; k++) fetch(r, place + k);
			commit_copies();
			place = (place + GROUP) % RING;
		}
	}
};

template <class T> DEVICE void norm_columns(const T *dy, const T *x, const float *mean, const float *rstd, float *gains, float *shifts, i64 rows, i64 cols) {
	SHARED(Ring<T>, ring, 1);
	const int lane = blockIdx.y, lanes = gridDim.y, count = ((u32)rows + lanes - 1 - lane) / (u32)lanes; // rows are fewer than 2^31
	const i64 c = (i64)blockIdx.x * LANE_COLUMNS + 2 * threadIdx.x, first = lane * cols + c;
	float sg[2] = {0, 0}, sb[2] = {0, 0};
	if (cols % 2 == 0 && (((u64)dy | (u64)x) & (2 * sizeof(T) - 1)) == 0) {
		const int left = c < cols ? count : 0;
		if (gains && mean) Lane<T, true, true>{dy + first, x + first, mean + lane, rstd + lane, lanes * cols, lanes, left}.sums(ring, count, sg, sb);
		else if (gains) Lane<T, true, false>{dy + first, x + first, mean, rstd + lane, lanes * cols, lanes, left}.sums(ring, count, sg, sb);
		else Lane<T, false, false>{dy + first, x, mean, rstd, lanes * cols, lanes, left}.sums(ring, count, sg, sb);
	} else {
#pragma unroll 1
		for (i64 n = lane; n < rows; n += lanes)
			for (int j = 0; j < 2 && c + j < cols; j++) {
				const float d = load(dy + n * cols + c + j);
				sb[j] += d;
				if (!gains) continue;
				const float v = load(x + n * cols + c + j);
				sg[j] += d * ((mean ? v - mean[n] : v) * rstd[n]);
			}
	}
	for (int j = 0; j < 2 && c + j < cols; j++) {
		if (gains) gains[lane * cols + c + j] = sg[j];
		if (shifts) shifts[lane * cols + c + j] = sb[j];
	}
}

// lanes_sum adds the sums of LANES lanes by a tree: lane l takes that of l+half, for half =
// LANES/2 to 1. Here it is what lane l has after the step of half STEP.
template <int L, int STEP, int LANES> DEVICE float lanes_sum(const float *sums, i64 cols) {
	if constexpr (STEP == LANES) return sums[L * cols];
	else return lanes_sum<L, 2 * STEP, LANES>(sums, cols) + lanes_sum<L + STEP, 2 * STEP, LANES>(sums, cols);
}

// norm_lanes adds the lanes of a column a thread.
template <int LANES, class G> DEVICE void norm_lanes(const float *sums, G *y, i64 cols, int accumulate) {
	const i64 c = first();
	if (c < cols) store(y + c, lanes_sum<0, 1, LANES>(sums + c, cols), accumulate);
}

#define NORM(T) \
	KERNEL(512, layernorm_##T, const int *skip, const T *x, const T *gamma, const T *beta, T *y, float *mean, float *rstd, i64 cols, float eps, int keep) { \
		SKIP(); \
		layernorm(Stored<T>(x, blockIdx.x, cols), gamma, beta, y, mean, rstd, cols, eps, keep); \
	} \
	KERNEL(512, add_layernorm_##T, const int *skip, const T *a, const T *b, T *sum, const T *gamma, const T *beta, T *y, float *mean, float *rstd, i64 cols, float eps, int keep) { \
		SKIP(); \
		layernorm(Summed<T>(a, b, sum, blockIdx.x, cols), gamma, beta, y, mean, rstd, cols, eps, keep); \
	} \
	KERNEL(512, rmsnorm_##T, const int *skip, const T *x, const T *gamma, T *y, float *rstd, i64 cols, float eps, int keep) { \
		SKIP(); \
		rmsnorm(Stored<T>(x, blockIdx.x, cols), gamma, y, rstd, cols, eps, keep); \
	} \
	KERNEL(512, add_rmsnorm_##T, const int *skip, const T *a, const T *b, T *sum, const T *gamma, T *y, float *rstd, i64 cols, float eps, int keep) { \
		SKIP(); \
		rmsnorm(Summed<T>(a, b, sum, blockIdx.x, cols), gamma, y, rstd, cols, eps, keep); \
	} \
	DENSE(512, 2, norm_dx_##T, const int *skip, const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, i64 cols, int accumulate, int keep) { \
		SKIP(); \
		norm_dx(dy, x, gamma, mean, rstd, dx, cols, accumulate, keep); \
	}
FOR_FLOATS(NORM)

#define NORM_COLUMNS(T) \
	KERNEL(32, norm_columns_##T, const int *skip, const T *dy, const T *x, const float *mean, const float *rstd, float *gains, float *shifts, i64 rows, i64 cols) { \
		SKIP(); \
		norm_columns(dy, x, mean, rstd, gains, shifts, rows, cols); \
	}
FOR_FLOATS(NORM_COLUMNS)

// A grid has two rows of blocks: for the gain and for the shift.
#define NORM_LANES(T, G) \
	KERNEL(64, norm_lanes_##T##_##G, const int *skip, const float *gains, const float *shifts, G *dgamma, G *dbeta, i64 cols, int accumulate_gamma, int accumulate_beta) { \
		SKIP(); \
		const bool gain = blockIdx.y == 0; \
		if (gain ? dgamma != 0 : dbeta != 0) norm_lanes<32 * sizeof(T)>(gain ? gains : shifts, gain ? dgamma : dbeta, cols, gain ? accumulate_gamma : accumulate_beta); \
	}
FOR_PAIRS(NORM_LANES)
