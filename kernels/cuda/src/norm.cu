// Layer norm and RMS norm. A block takes a row: a thread has of every so many packs of 16 bytes
// one, HELD at most, so that the bits depend on the width alone. It holds them in registers, and
// all of a row is read before anything of it is used: rows are short, and few blocks must keep
// the memory busy. Rows that packs do not hold whole are read anew in each pass (PACKS is 0).
// Statistics take two passes in f32.
enum { HELD = 8 };

// HOLDS is a thread's packs: k of its own, element c of the row on.
#define HOLDS(k, c) _Pragma("unroll (PACKS ? HELD : 1)") for (int k = 0, c = Pack<T>::N * (int)threadIdx.x; k < HELD; k++, c += Pack<T>::N * (int)blockDim.x)

// Row is a row of values in memory. PACKS: packs of 16 bytes hold it whole.
template <class T, bool PACKS> struct Row {
	const T *at;
	int cols;
	__device__ __forceinline__ Row(const T *base, i64 row, int cols) : at(base + row * cols), cols(cols) {}

	// read reads the pack at c, zeros beyond the row.
	__device__ __forceinline__ Words<4> read(int c) const {
		Words<4> u = {{0, 0, 0, 0}};
		if (PACKS) {
			if (c < cols) u = Words<4>::at(at + c);
			return u;
		}
#pragma unroll
		for (int j = 0; j < Pack<T>::N; j++)
			if (c + j < cols) set(u, j, at[c + j]);
		return u;
	}
	__device__ __forceinline__ void write(int c, const Pack<T> &v) const {
		if (PACKS) {
			if (c < cols) v.to((T *)at + c);
			return;
		}
#pragma unroll
		for (int j = 0; j < Pack<T>::N; j++)
			if (c + j < cols) narrow((T *)at + c + j, v.v[j]);
	}
	static __device__ __forceinline__ void set(Words<4> &u, int j, float x) { u.w[j] = bits_of(x); }
	template <class H> static __device__ __forceinline__ void set(Words<4> &u, int j, H x) { u.w[j / 2] |= (u32)x.bits << 16 * (j % 2); }
};

template <class T> DEVICE Pack<T> pack_of(const Words<4> &u) { return Pack<T>::of({u.w[0], u.w[1], u.w[2], u.w[3]}); }

// as_stored rounds a pack as storing it would.
DEVICE Words<4> as_stored(const Pack<f32> &p) { return {{bits_of(p.v[0]), bits_of(p.v[1]), bits_of(p.v[2]), bits_of(p.v[3])}}; }
DEVICE Words<4> as_stored(const Pack<bf16> &p) { return {{two_bf16(p.v[0], p.v[1]), two_bf16(p.v[2], p.v[3]), two_bf16(p.v[4], p.v[5]), two_bf16(p.v[6], p.v[7])}}; }
DEVICE Words<4> as_stored(const Pack<f16> &p) { return {{two_f16(p.v[0], p.v[1]), two_f16(p.v[2], p.v[3]), two_f16(p.v[4], p.v[5]), two_f16(p.v[6], p.v[7])}}; }

// What a norm is taken of: a row of x, or of the sum of two, which it stores. hold reads it;
// then at gives the thread's pack k, at element c.
template <class T, bool PACKS> struct Stored {
	const Row<T, PACKS> x;
	Words<4> held[PACKS ? HELD : 1];
	__device__ __forceinline__ Stored(const Row<T, PACKS> &x) : x(x) {}
	__device__ __forceinline__ void hold() {
		if (PACKS)
			HOLDS(k, c) held[k] = x.read(c);
	}
	__device__ __forceinline__ Pack<T> at(int k, int c) const { return pack_of<T>(PACKS ? held[k] : x.read(c)); }
};

template <class T, bool PACKS> struct Summed {
	const Row<T, PACKS> a, b, sum;
	Words<4> held[PACKS ? HELD : 1], more[PACKS ? HELD : 1];
	__device__ __forceinline__ Summed(const Row<T, PACKS> &a, const Row<T, PACKS> &b, const Row<T, PACKS> &sum) : a(a), b(b), sum(sum) {}
	__device__ __forceinline__ void hold() {
		if (PACKS)
			HOLDS(k, c) held[k] = a.read(c), more[k] = b.read(c);
		HOLDS(k, c) {
			if (c >= sum.cols) break;
			Pack<T> v = pack_of<T>(PACKS ? held[k] : a.read(c));
			const Pack<T> w = pack_of<T>(PACKS ? more[k] : b.read(c));
			for (int j = 0; j < Pack<T>::N; j++) v.v[j] += w.v[j];
			sum.write(c, v);
			if (PACKS) held[k] = as_stored(v);
		}
	}
	__device__ __forceinline__ Pack<T> at(int k, int c) const { return pack_of<T>(PACKS ? held[k] : sum.read(c)); }
};

template <class T, bool PACKS, class In> DEVICE void layernorm(In in, const T *gamma, const T *beta, T *y, float *mean, float *rstd, int cols, float eps) {
	SHARED(float, partial, 32);
	const i64 n = blockIdx.x;
	const Row<T, PACKS> g(gamma, 0, cols), b(beta, 0, cols);
	const Row<T, PACKS> out(y, n, cols);
	in.hold();
	float s = 0;
	HOLDS(k, c) {
		if (c >= cols) break;
		const Pack<T> v = in.at(k, c);
		for (int j = 0; j < Pack<T>::N; j++) s += v.v[j];
	}
	const float m = block_sum(s, partial) / (float)cols;
	s = 0;
	HOLDS(k, c) {
		if (c >= cols) break;
		const Pack<T> v = in.at(k, c);
		for (int j = 0; j < Pack<T>::N; j++) {
			const float d = PACKS || c + j < cols ? v.v[j] - m : 0.0f;
			s = fma_(d, d, s);
		}
	}
	const float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	HOLDS(k, c) {
		if (c >= cols) break;
		Pack<T> v = in.at(k, c);
		const Pack<T> w = pack_of<T>(g.read(c)), z = pack_of<T>(b.read(c));
		for (int j = 0; j < Pack<T>::N; j++) v.v[j] = fma_((v.v[j] - m) * r, w.v[j], z.v[j]);
		out.write(c, v);
	}
	if (threadIdx.x == 0) mean[n] = m, rstd[n] = r;
}

template <class T, bool PACKS, class In> DEVICE void rmsnorm(In in, const T *gamma, T *y, float *rstd, int cols, float eps) {
	SHARED(float, partial, 32);
	const i64 n = blockIdx.x;
	const Row<T, PACKS> g(gamma, 0, cols);
	const Row<T, PACKS> out(y, n, cols);
	in.hold();
	float s = 0;
	HOLDS(k, c) {
		if (c >= cols) break;
		const Pack<T> v = in.at(k, c);
		for (int j = 0; j < Pack<T>::N; j++) s = fma_(v.v[j], v.v[j], s);
	}
	const float r = 1 / sqrt_(block_sum(s, partial) / (float)cols + eps);
	HOLDS(k, c) {
		if (c >= cols) break;
		Pack<T> v = in.at(k, c);
		const Pack<T> w = pack_of<T>(g.read(c));
		for (int j = 0; j < Pack<T>::N; j++) v.v[j] = v.v[j] * r * w.v[j];
		out.write(c, v);
	}
	if (threadIdx.x == 0) rstd[n] = r;
}

// The gradients: with h = (x-mean)·rstd and g = dy·gamma, dx = rstd·(g - Σg/C - h·Σ(g·h)/C);
// an RMS norm has no mean and no Σg. dgamma = Σ dy·h and dbeta = Σ dy over rows.
//
// Block l of LANES takes rows l, l+LANES, … in order, and a thread KEPT columns of them (8, of
// wide rows 16), whose sums over the lane's rows stay in its registers: x and dy are read once.
// The next row is read while this one is worked on. norm_lanes adds the sums of the lanes. Their
// number is a constant, so that the bits do not depend on the card.
enum { LANES = 512 };

// KEEPS is a thread's packs of a row: k of its own, element c of the row on.
#define KEEPS(k, c) _Pragma("unroll") for (int k = 0, c = Pack<T>::N * (int)threadIdx.x; k < KEPT / Pack<T>::N; k++, c += Pack<T>::N * (int)blockDim.x)

// block_sums is block_sum of two.
DEVICE void block_sums(float &x, float &y, float *partial) {
	x = warp_sum(x), y = warp_sum(y);
	const int warps = blockDim.x / 32, t = threadIdx.x % 32;
	if (warps == 1) return;
	if (t == 0) partial[threadIdx.x / 32] = x, partial[32 + threadIdx.x / 32] = y;
	__syncthreads();
	x = warp_sum(t < warps ? partial[t] : 0.0f), y = warp_sum(t < warps ? partial[32 + t] : 0.0f);
	__syncthreads();
}

// InLane is a row of a lane as it was read.
template <class T, int KEPT> struct InLane {
	Words<4> x[KEPT / Pack<T>::N], dy[KEPT / Pack<T>::N];
	float mean, rstd;
};

template <class T, bool PACKS, int KEPT> DEVICE void norm_grad(const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, float *gains, float *shifts, i64 rows, int cols, int accumulate) {
	SHARED(float, partial, 64);
	const int N = Pack<T>::N;
	const Row<T, PACKS> gain(gamma, 0, cols);
	float sg[KEPT], sb[KEPT];
	for (int j = 0; j < KEPT; j++) sg[j] = 0, sb[j] = 0;
	InLane<T, KEPT> next;
	const auto read = [&](i64 n) {
		if (n >= rows) return;
		const Row<T, PACKS> xs(x, n, cols), dys(dy, n, cols);
		KEEPS(k, c) next.x[k] = xs.read(c), next.dy[k] = dys.read(c);
		next.mean = mean ? mean[n] : 0.0f, next.rstd = rstd[n];
	};
	read(blockIdx.x);
#pragma unroll 1
	for (i64 n = blockIdx.x; n < rows; n += LANES) {
		const InLane<T, KEPT> row = next;
		const Row<T, PACKS> out(dx, n, cols);
		Words<4> old[KEPT / Pack<T>::N];
		if (accumulate)
			KEEPS(k, c) old[k] = out.read(c);
		read(n + LANES);
		const auto normal = [&](float v) { return mean ? (v - row.mean) * row.rstd : v * row.rstd; };
		float m1 = 0, m2 = 0;
		KEEPS(k, c) {
			const Pack<T> v = pack_of<T>(row.x[k]), d = pack_of<T>(row.dy[k]), f = pack_of<T>(gain.read(c));
			for (int j = 0; j < N; j++) { // gradients beyond the row are 0
				const float h = normal(v.v[j]), g = d.v[j] * f.v[j];
				sg[k * N + j] += d.v[j] * h, sb[k * N + j] += d.v[j];
				m1 += g;
				m2 = fma_(g, h, m2);
			}
		}
		if (!dx) continue;
		block_sums(m1, m2, partial);
		m1 /= (float)cols, m2 /= (float)cols;
		KEEPS(k, c) {
			if (c >= cols) break;
			Pack<T> v = pack_of<T>(row.x[k]);
			const Pack<T> d = pack_of<T>(row.dy[k]), f = pack_of<T>(gain.read(c)), o = pack_of<T>(old[k]);
			for (int j = 0; j < N; j++) {
				const float h = normal(v.v[j]), g = d.v[j] * f.v[j];
				v.v[j] = row.rstd * fma_(-h, m2, mean ? g - m1 : g);
				if (accumulate) v.v[j] = o.v[j] + v.v[j];
			}
			out.write(c, v);
		}
	}
	KEEPS(k, c)
		for (int j = 0; j < N && c + j < cols; j++) {
			if (gains) gains[(i64)blockIdx.x * cols + c + j] = sg[k * N + j];
			if (shifts) shifts[(i64)blockIdx.x * cols + c + j] = sb[k * N + j];
		}
}

// norm_lanes adds the sums of LANES lanes of a column: a thread so many neighbours in order, and
// the PARTS threads of a column by halves.
enum { PARTS = 16 };

template <class G> DEVICE void norm_lanes(const float *sums, G *y, i64 cols, int accumulate) {
	SHARED(float, part, PARTS * 32);
	const i64 c = (i64)blockIdx.x * 32 + threadIdx.x;
	const float *at = sums + (i64)threadIdx.y * (LANES / PARTS) * cols + c;
	float s = 0;
	if (c < cols)
#pragma unroll 16
		for (int l = 0; l < LANES / PARTS; l++) s += at[l * cols];
	part[threadIdx.y * 32 + threadIdx.x] = s;
	for (int half = PARTS / 2; half > 0; half /= 2) {
		__syncthreads();
		if ((int)threadIdx.y < half) part[threadIdx.y * 32 + threadIdx.x] += part[(threadIdx.y + half) * 32 + threadIdx.x];
	}
	if (threadIdx.y == 0 && c < cols) store(y + c, part[threadIdx.x], accumulate);
}

// BOTH calls f<T, PACKS>(…) for rows that packs hold whole, all of which begin at multiples of
// 16 bytes, and for others.
#define BOTH(T, places, call) do { \
	if (cols % Pack<T>::N == 0 && wide places) { \
		enum { PACKS = 1 }; \
		call; \
	} else { \
		enum { PACKS = 0 }; \
		call; \
	} \
} while (0)

#define NORM(T) \
	KERNEL(512, layernorm_##T, const int *skip, const T *x, const T *gamma, const T *beta, T *y, float *mean, float *rstd, int cols, float eps) { \
		SKIP(); \
		BOTH(T, (x, gamma, beta, y), (layernorm<T, PACKS>(Stored<T, PACKS>({x, blockIdx.x, cols}), gamma, beta, y, mean, rstd, cols, eps))); \
	} \
	KERNEL(512, add_layernorm_##T, const int *skip, const T *a, const T *b, T *sum, const T *gamma, const T *beta, T *y, float *mean, float *rstd, int cols, float eps) { \
		SKIP(); \
		BOTH(T, (a, b, sum, gamma, beta, y), (layernorm<T, PACKS>(Summed<T, PACKS>({a, blockIdx.x, cols}, {b, blockIdx.x, cols}, {sum, blockIdx.x, cols}), gamma, beta, y, mean, rstd, cols, eps))); \
	} \
	KERNEL(512, rmsnorm_##T, const int *skip, const T *x, const T *gamma, T *y, float *rstd, int cols, float eps) { \
		SKIP(); \
		BOTH(T, (x, gamma, y), (rmsnorm<T, PACKS>(Stored<T, PACKS>({x, blockIdx.x, cols}), gamma, y, rstd, cols, eps))); \
	} \
	KERNEL(512, add_rmsnorm_##T, const int *skip, const T *a, const T *b, T *sum, const T *gamma, T *y, float *rstd, int cols, float eps) { \
		SKIP(); \
		BOTH(T, (a, b, sum, gamma, y), (rmsnorm<T, PACKS>(Summed<T, PACKS>({a, blockIdx.x, cols}, {b, blockIdx.x, cols}, {sum, blockIdx.x, cols}), gamma, y, rstd, cols, eps))); \
	}
FOR_FLOATS(NORM)

// Wide rows have more threads, and those too few registers for 16 sums each: some words lie in
// local memory.
#define NORM_GRAD(T) \
	DENSE(512, sizeof(T) == 2 ? 2 : 1, norm_grad_##T, const int *skip, const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, float *gains, float *shifts, i64 rows, int cols, int accumulate) { \
		SKIP(); \
		BOTH(T, (dy, x, gamma, dx), (norm_grad<T, PACKS, 8>(dy, x, gamma, mean, rstd, dx, gains, shifts, rows, cols, accumulate))); \
	} \
	KERNEL(1024, norm_grad_wide_##T, const int *skip, const T *dy, const T *x, const T *gamma, const float *mean, const float *rstd, T *dx, float *gains, float *shifts, i64 rows, int cols, int accumulate) { \
		SKIP(); \
		BOTH(T, (dy, x, gamma, dx), (norm_grad<T, PACKS, 16>(dy, x, gamma, mean, rstd, dx, gains, shifts, rows, cols, accumulate))); \
	}
FOR_FLOATS(NORM_GRAD)

// A grid has two rows of blocks: for the gain and for the shift.
#define NORM_LANES(G) \
	KERNEL(32 * PARTS, norm_lanes_##G, const int *skip, const float *gains, const float *shifts, G *dgamma, G *dbeta, i64 cols, int accumulate_gamma, int accumulate_beta) { \
		SKIP(); \
		const bool gain = blockIdx.y == 0; \
		if (gain ? dgamma != 0 : dbeta != 0) norm_lanes(gain ? gains : shifts, gain ? dgamma : dbeta, cols, gain ? accumulate_gamma : accumulate_beta); \
	}
FOR_FLOATS(NORM_LANES)
