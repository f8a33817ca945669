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

// The gradients by gain and shift: dgamma = Σ dy·h, dbeta = Σ dy over rows. A
// block takes as many columns as 32 bytes hold, a thread four of them; a lane of rows
// takes every LANES-th row in order, and the lanes' sums are added by a fixed tree.
template <class T, class G> DEVICE void norm_columns(const T *dy, const T *x, const float *mean, const float *rstd, G *dgamma, G *dbeta, i64 rows, i64 cols, int accumulate_gamma, int accumulate_beta) {
	const int WIDTH = 32 / sizeof(T), LANES = 1024 / WIDTH;
	SHARED(float, gain, 1024);
	SHARED(float, shift, 1024);
	const int t = threadIdx.x, lane = t / (WIDTH / 4), at = 4 * t;
	const i64 c = (i64)blockIdx.x * WIDTH + at % WIDTH;
	float sg[4] = {0, 0, 0, 0}, sb[4] = {0, 0, 0, 0}, d[4], v[4];
	if (c < cols) {
#pragma unroll 1
		for (i64 n = lane; n < rows; n += LANES) {
			Row<const T>(dy, n, cols).read(c, cols, d);
			for (int j = 0; j < 4; j++) sb[j] += d[j];
			if (dgamma) {
				Row<const T>(x, n, cols).read(c, cols, v);
				const float m = mean ? mean[n] : 0.0f, r = rstd[n];
				for (int j = 0; j < 4; j++) sg[j] += d[j] * ((mean ? v[j] - m : v[j]) * r);
			}
		}
	}
	put_shared<4>(gain + at, sg), put_shared<4>(shift + at, sb);
	for (int half = LANES / 2; half > 0; half /= 2) {
		__syncthreads();
		if (lane >= half) continue;
		for (int j = 0; j < 4; j++) gain[at + j] += gain[at + j + half * WIDTH], shift[at + j] += shift[at + j + half * WIDTH];
	}
	if (lane != 0) return;
	for (int j = 0; j < 4 && c + j < cols; j++) {
		if (dgamma) store(dgamma + c + j, gain[at + j], accumulate_gamma);
		if (dbeta) store(dbeta + c + j, shift[at + j], accumulate_beta);
	}
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
	KERNEL(512, norm_dx_##T, const int *skip, const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, i64 cols, int accumulate, int keep) { \
		SKIP(); \
		norm_dx(dy, x, gamma, mean, rstd, dx, cols, accumulate, keep); \
	}
FOR_FLOATS(NORM)

#define NORM_COLUMNS(T, G) \
	KERNEL(256, norm_columns_##T##_##G, const int *skip, const T *dy, const T *x, const float *mean, const float *rstd, G *dgamma, G *dbeta, i64 rows, i64 cols, int accumulate_gamma, int accumulate_beta) { \
		SKIP(); \
		norm_columns(dy, x, mean, rstd, dgamma, dbeta, rows, cols, accumulate_gamma, accumulate_beta); \
	}
FOR_PAIRS(NORM_COLUMNS)
