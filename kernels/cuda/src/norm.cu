// Layer norm and RMS norm. A block takes a row; a thread takes quads of columns,
// the same ones whether they are read 16 bytes at a time or not, so that the bits
// depend on the width alone. Statistics take two passes in f32.

// Row is a row of values whose quads threads share out.
template <class T> struct Row {
	const T *at;
	bool packs;
	__device__ __forceinline__ Row(const T *base, i64 row, i64 cols) : at(base + row * cols), packs(cols % Pack<T>::N == 0 && wide(base)) {}
	// quad reads columns c to c+3, 0 beyond the row.
	__device__ __forceinline__ void quad(i64 c, i64 cols, float *v) const {
		if (packs) {
			four(at + c, v);
			return;
		}
		for (int j = 0; j < 4; j++) v[j] = c + j < cols ? load(at + c + j) : 0.0f;
	}
	static __device__ __forceinline__ void four(const float *p, float *v) {
		Pack<float> q = Pack<float>::at(p);
		for (int j = 0; j < 4; j++) v[j] = q.v[j];
	}
	static __device__ __forceinline__ void four(const bf16 *p, float *v) {
		ALIGNED(p, 8);
		uint2 u = *(const uint2 *)p;
		v[0] = of_bits(u.x << 16), v[1] = of_bits(u.x & 0xffff0000u), v[2] = of_bits(u.y << 16), v[3] = of_bits(u.y & 0xffff0000u);
	}
	static __device__ __forceinline__ void four(const f16 *p, float *v) {
		ALIGNED(p, 8);
		uint2 u = *(const uint2 *)p;
		v[0] = f16_at(u.x), v[1] = f16_at(u.x >> 16), v[2] = f16_at(u.y), v[3] = f16_at(u.y >> 16);
	}
};

// put writes or accumulates columns c to c+3 of a row.
template <class T> DEVICE void put(T *y, i64 c, i64 cols, const float *v, int accumulate) {
	for (int j = 0; j < 4; j++)
		if (c + j < cols) store(y + c + j, v[j], accumulate);
}

#define QUADS(c, cols) for (i64 c = 4 * (i64)threadIdx.x; c < cols; c += 4 * (i64)blockDim.x)

template <class T> DEVICE void layernorm(const T *x, const T *gamma, const T *beta, T *y, float *mean, float *rstd, i64 cols, float eps) {
	SHARED(float, partial, 32);
	const i64 n = blockIdx.x;
	Row<T> row(x, n, cols), g(gamma, 0, cols), b(beta, 0, cols);
	float v[4], w[4], z[4], s = 0;
	QUADS(c, cols) {
		row.quad(c, cols, v);
		for (int j = 0; j < 4; j++) s += v[j];
	}
	float m = block_sum(s, partial) / (float)cols;
	s = 0;
	QUADS(c, cols) {
		row.quad(c, cols, v);
		for (int j = 0; j < 4; j++) {
			float d = c + j < cols ? v[j] - m : 0.0f;
			s = fma_(d, d, s);
		}
	}
	float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	QUADS(c, cols) {
		row.quad(c, cols, v);
		g.quad(c, cols, w);
		b.quad(c, cols, z);
		for (int j = 0; j < 4; j++) v[j] = fma_((v[j] - m) * r, w[j], z[j]);
		put(y + n * cols, c, cols, v, 0);
	}
	if (threadIdx.x == 0) mean[n] = m, rstd[n] = r;
}

template <class T> DEVICE void rmsnorm(const T *x, const T *gamma, T *y, float *rstd, i64 cols, float eps) {
	SHARED(float, partial, 32);
	const i64 n = blockIdx.x;
	Row<T> row(x, n, cols), g(gamma, 0, cols);
	float v[4], w[4], s = 0;
	QUADS(c, cols) {
		row.quad(c, cols, v);
		for (int j = 0; j < 4; j++) s = fma_(v[j], v[j], s);
	}
	float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	QUADS(c, cols) {
		row.quad(c, cols, v);
		g.quad(c, cols, w);
		for (int j = 0; j < 4; j++) v[j] = v[j] * r * w[j];
		put(y + n * cols, c, cols, v, 0);
	}
	if (threadIdx.x == 0) rstd[n] = r;
}

// The gradient by x. With h = (x-mean)·rstd and g = dy·gamma: dx =
// rstd·(g - Σg/C - h·Σ(g·h)/C); an RMS norm has no mean and no Σg.
template <class T> DEVICE void norm_dx(const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, i64 cols, int accumulate) {
	SHARED(float, partial, 32);
	const i64 n = blockIdx.x;
	Row<T> row(x, n, cols), grad(dy, n, cols), gain(gamma, 0, cols);
	const float m = mean ? mean[n] : 0.0f, r = rstd[n];
	float v[4], d[4], w[4], s1 = 0, s2 = 0;
	QUADS(c, cols) {
		row.quad(c, cols, v);
		grad.quad(c, cols, d);
		gain.quad(c, cols, w);
		for (int j = 0; j < 4; j++) {
			if (c + j >= cols) break;
			float h = mean ? (v[j] - m) * r : v[j] * r, g = d[j] * w[j];
			s1 += g;
			s2 = fma_(g, h, s2);
		}
	}
	float m1 = mean ? block_sum(s1, partial) / (float)cols : 0.0f;
	float m2 = block_sum(s2, partial) / (float)cols;
	QUADS(c, cols) {
		row.quad(c, cols, v);
		grad.quad(c, cols, d);
		gain.quad(c, cols, w);
		for (int j = 0; j < 4; j++) {
			float h = mean ? (v[j] - m) * r : v[j] * r, g = d[j] * w[j];
			v[j] = r * fma_(-h, m2, mean ? g - m1 : g);
		}
		put(dx + n * cols, c, cols, v, accumulate);
	}
}

// The gradients by gain and shift: dgamma = Σ dy·h, dbeta = Σ dy over rows. A
// block takes as many columns as 32 bytes hold; a lane of rows takes every
// LANES-th row in order, and the lanes' sums are added by a fixed tree.
template <class T, class G> DEVICE void norm_columns(const T *dy, const T *x, const float *mean, const float *rstd, G *dgamma, G *dbeta, i64 rows, i64 cols, int accumulate_gamma, int accumulate_beta) {
	const int WIDTH = 32 / sizeof(T), LANES = 1024 / WIDTH;
	SHARED(float, gain, 1024);
	SHARED(float, shift, 1024);
	const int t = threadIdx.x, lane = t / WIDTH;
	const i64 c = (i64)blockIdx.x * WIDTH + t % WIDTH;
	float sg = 0, sb = 0;
	if (c < cols) {
		for (i64 n = lane; n < rows; n += LANES) {
			float d = load(dy + n * cols + c);
			sb += d;
			if (dgamma) {
				float v = load(x + n * cols + c);
				sg += d * ((mean ? v - mean[n] : v) * rstd[n]);
			}
		}
	}
	gain[t] = sg, shift[t] = sb;
	for (int half = LANES / 2; half > 0; half /= 2) {
		__syncthreads();
		if (lane < half) gain[t] += gain[t + half * WIDTH], shift[t] += shift[t + half * WIDTH];
	}
	if (lane == 0 && c < cols) {
		if (dgamma) store(dgamma + c, gain[t], accumulate_gamma);
		if (dbeta) store(dbeta + c, shift[t], accumulate_beta);
	}
}

#define NORM(T) \
	KERNEL(512, layernorm_##T, const int *skip, const T *x, const T *gamma, const T *beta, T *y, float *mean, float *rstd, i64 cols, float eps) { \
		SKIP(); \
		layernorm(x, gamma, beta, y, mean, rstd, cols, eps); \
	} \
	KERNEL(512, rmsnorm_##T, const int *skip, const T *x, const T *gamma, T *y, float *rstd, i64 cols, float eps) { \
		SKIP(); \
		rmsnorm(x, gamma, y, rstd, cols, eps); \
	} \
	KERNEL(512, norm_dx_##T, const int *skip, const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, i64 cols, int accumulate) { \
		SKIP(); \
		norm_dx(dy, x, gamma, mean, rstd, dx, cols, accumulate); \
	}
FOR_FLOATS(NORM)

#define NORM_COLUMNS(T, G) \
	KERNEL(1024, norm_columns_##T##_##G, const int *skip, const T *dy, const T *x, const float *mean, const float *rstd, G *dgamma, G *dbeta, i64 rows, i64 cols, int accumulate_gamma, int accumulate_beta) { \
		SKIP(); \
		norm_columns(dy, x, mean, rstd, dgamma, dbeta, rows, cols, accumulate_gamma, accumulate_beta); \
	}
FOR_PAIRS(NORM_COLUMNS)
