// Elementwise kernels: a grid-stride loop over packs of 16 bytes where all
// addresses allow it, else over elements.

// in_packs is how many of n elements packs hold: all whole packs, or none.
template <class T> DEVICE i64 in_packs(bool packs, i64 n) { return packs ? n / Pack<T>::N * Pack<T>::N : 0; }

// PACKS and REST walk over the packs and over what they leave.
#define PACKS(i, T, done) _Pragma("unroll 1") for (i64 i = first() * Pack<T>::N; i < done; i += stride() * Pack<T>::N)
#define REST(i, done, n) _Pragma("unroll 1") for (i64 i = done + first(); i < n; i += stride())

// map0, map1 and map2 apply f(operands…) to element i of no, one or two inputs.
template <class T> DEVICE void map0(T *y, i64 n, int accumulate, float v) {
	const i64 done = in_packs<T>(wide(y), n);
	PACKS(i, T, done) {
		Pack<T> old, r;
		if (accumulate) old = Pack<T>::at(y + i);
		for (int j = 0; j < Pack<T>::N; j++) r.v[j] = accumulate ? old.v[j] + v : v;
		r.to(y + i);
	}
	REST(i, done, n) store(y + i, v, accumulate);
}

template <class T, class F> DEVICE void map1(const T *a, T *y, i64 n, int accumulate, F f) {
	const i64 done = in_packs<T>(wide(a, y), n);
	PACKS(i, T, done) {
		Pack<T> p = Pack<T>::at(a + i), old, r;
		if (accumulate) old = Pack<T>::at(y + i);
		for (int j = 0; j < Pack<T>::N; j++) r.v[j] = accumulate ? old.v[j] + f(p.v[j]) : f(p.v[j]);
		r.to(y + i);
	}
	REST(i, done, n) store(y + i, f(load(a + i)), accumulate);
}

template <class T, class F> DEVICE void map2(const T *a, const T *b, T *y, i64 n, int accumulate, F f) {
	const i64 done = in_packs<T>(wide(a, b, y), n);
	PACKS(i, T, done) {
		Pack<T> p = Pack<T>::at(a + i), q = Pack<T>::at(b + i), old, r;
		if (accumulate) old = Pack<T>::at(y + i);
		for (int j = 0; j < Pack<T>::N; j++) r.v[j] = accumulate ? old.v[j] + f(p.v[j], q.v[j]) : f(p.v[j], q.v[j]);
		r.to(y + i);
	}
	REST(i, done, n) store(y + i, f(load(a + i), load(b + i)), accumulate);
}

struct AddOf { __device__ __forceinline__ float operator()(float a, float b) const { return a + b; } };
struct SubOf { __device__ __forceinline__ float operator()(float a, float b) const { return a - b; } };
struct MulOf { __device__ __forceinline__ float operator()(float a, float b) const { return a * b; } };
struct ScaleOf { float f; __device__ __forceinline__ float operator()(float a) const { return f * a; } };

#define BINARY(T) \
	KERNEL(256, add_##T, const int *skip, const T *a, const T *b, T *y, i64 n, int accumulate) { \
		SKIP(); \
		map2(a, b, y, n, accumulate, AddOf()); \
	} \
	KERNEL(256, sub_##T, const int *skip, const T *a, const T *b, T *y, i64 n, int accumulate) { \
		SKIP(); \
		map2(a, b, y, n, accumulate, SubOf()); \
	} \
	KERNEL(256, mul_##T, const int *skip, const T *a, const T *b, T *y, i64 n, int accumulate) { \
		SKIP(); \
		map2(a, b, y, n, accumulate, MulOf()); \
	} \
	KERNEL(256, scale_##T, const int *skip, const T *x, T *y, i64 n, int accumulate, float f) { \
		SKIP(); \
		map1(x, y, n, accumulate, ScaleOf{f}); \
	} \
	KERNEL(256, sum_grad_##T, const int *skip, const double *dy, T *dx, i64 n, int accumulate) { \
		SKIP(); \
		map0(dx, n, accumulate, (float)*dy); \
	}
FOR_FLOATS(BINARY)

// Activations: forward and derivative, as package num defines them.

struct GeluTanh {
	static __device__ __forceinline__ float sig(float x, float x2) {
		float u = fma_(0.044715f, x2 * x, x);
		return 1 / (1 + exp_(u * -1.5957691216f));
	}
	static __device__ __forceinline__ float f(float x) { return x * sig(x, x * x); }
	static __device__ __forceinline__ float d(float x) {
		float x2 = x * x, s = sig(x, x2);
		float q = x * s * (1 - s);
		return fma_(q, fma_((float)(3 * 0.044715 * 1.5957691216), x2, 1.5957691216f), s);
	}
};

DEVICE float erf_(float x) {
	if (x > 4) x = 4;
	if (x < -4) x = -4;
	float z = x * x;
	float p = fma_(-2.72614225801306e-10f, z, 2.77068142495902e-08f);
	p = fma_(p, z, -2.10102402082508e-06f);
	p = fma_(p, z, -5.69250639462346e-05f);
	p = fma_(p, z, -7.34990630326855e-04f);
	p = fma_(p, z, -2.95459980854025e-03f);
	p = fma_(p, z, -1.60960333262415e-02f);
	float q = fma_(-1.45660718464996e-05f, z, -2.13374055278905e-04f);
	q = fma_(q, z, -1.68282697438203e-03f);
	q = fma_(q, z, -7.37332916720468e-03f);
	q = fma_(q, z, -1.42647390514189e-02f);
	return x * p / q;
}

struct Gelu {
	static __device__ __forceinline__ float cdf(float x) { return fma_(0.5f, erf_(x * 0.70710678118654752440f), 0.5f); }
	static __device__ __forceinline__ float f(float x) { return x * cdf(x); }
	static __device__ __forceinline__ float d(float x) {
		float e = exp_(x * x * -0.5f);
		return fma_(x * 0.398942280401432677939946f, e, cdf(x));
	}
};

struct Silu {
	static __device__ __forceinline__ float f(float x) { return x * sigmoid_(x); }
	static __device__ __forceinline__ float d(float x) {
		float s = sigmoid_(x);
		return fma_(x * s, 1 - s, s);
	}
};

template <class A> struct Forward { __device__ __forceinline__ float operator()(float x) const { return A::f(x); } };
template <class A> struct Backward { __device__ __forceinline__ float operator()(float dy, float x) const { return dy * A::d(x); } };
struct Relu { __device__ __forceinline__ float operator()(float x) const { return x < 0 ? 0 : x; } };
struct ReluGrad { __device__ __forceinline__ float operator()(float dy, float x) const { return x <= 0 ? 0 : dy; } };

#define ACTIVATION(T, name, forward, backward) \
	KERNEL(256, act_##name##_##T, const int *skip, const T *x, T *y, i64 n) { \
		SKIP(); \
		map1(x, y, n, 0, forward()); \
	} \
	KERNEL(256, act_grad_##name##_##T, const int *skip, const T *dy, const T *x, T *dx, i64 n, int accumulate) { \
		SKIP(); \
		map2(dy, x, dx, n, accumulate, backward()); \
	}
#define ACTIVATIONS(T) \
	ACTIVATION(T, gelu_tanh, Forward<GeluTanh>, Backward<GeluTanh>) \
	ACTIVATION(T, gelu, Forward<Gelu>, Backward<Gelu>) \
	ACTIVATION(T, silu, Forward<Silu>, Backward<Silu>) \
	ACTIVATION(T, relu, Relu, ReluGrad)
FOR_FLOATS(ACTIVATIONS)

struct SwigluOf { __device__ __forceinline__ float operator()(float g, float u) const { return g * sigmoid_(g) * u; } };

DEVICE void swiglu_grads(float g, float u, float d, float *dg, float *du) {
	float s = sigmoid_(g), q = g * s;
	*du = d * q;
	*dg = d * u * fma_(q, 1 - s, s);
}

template <class T> DEVICE void swiglu_grad(const T *dy, const T *gate, const T *up, T *dgate, T *dup, i64 n) {
	const i64 done = in_packs<T>(wide(dy, gate, up, dgate, dup), n);
	PACKS(i, T, done) {
		Pack<T> g = Pack<T>::at(gate + i), u = Pack<T>::at(up + i), d = Pack<T>::at(dy + i);
		for (int j = 0; j < Pack<T>::N; j++) swiglu_grads(g.v[j], u.v[j], d.v[j], &g.v[j], &u.v[j]);
		g.to(dgate + i), u.to(dup + i);
	}
	REST(i, done, n) {
		float dg, du;
		swiglu_grads(load(gate + i), load(up + i), load(dy + i), &dg, &du);
		narrow(dgate + i, dg), narrow(dup + i, du);
	}
}

#define SWIGLU(T) \
	KERNEL(256, swiglu_##T, const int *skip, const T *gate, const T *up, T *y, i64 n) { \
		SKIP(); \
		map2(gate, up, y, n, 0, SwigluOf()); \
	} \
	DENSE(256, 4, swiglu_grad_##T, const int *skip, const T *dy, const T *gate, const T *up, T *dgate, T *dup, i64 n) { \
		SKIP(); \
		swiglu_grad(dy, gate, up, dgate, dup, n); \
	}
FOR_FLOATS(SWIGLU)

// Fills of elements of 1, 2, 4 and 8 bytes.
template <class T> DEVICE void fill(T *y, i64 n, u64 v) {
	const int N = 16 / sizeof(T);
	for (int bits = 8 * sizeof(T); bits < 64; bits *= 2) v = v << bits | (v & ((1ull << bits) - 1));
	const Words<4> pack = {{(u32)v, (u32)(v >> 32), (u32)v, (u32)(v >> 32)}};
	const i64 done = wide(y) ? n / N * N : 0;
#pragma unroll 1
	for (i64 i = first() * N; i < done; i += stride() * N) pack.to(y + i);
	REST(i, done, n) y[i] = (T)v;
}

#define FILL(name, T) \
	KERNEL(256, name, const int *skip, T *y, i64 n, u64 v) { \
		SKIP(); \
		fill(y, n, v); \
	}
FILL(fill_1, unsigned char)
FILL(fill_2, u16)
FILL(fill_4, u32)
FILL(fill_8, u64)

// Casts: 8 elements at a time, 16 bytes of the narrower type.
template <class T, class U> DEVICE void cast(const T *x, U *y, i64 n, int accumulate) {
	const i64 done = wide(x, y) ? n / 8 * 8 : 0;
#pragma unroll 1
	for (i64 i = first() * 8; i < done; i += stride() * 8) {
		float v[8], old[8];
		get<8>(x + i, v);
		if (accumulate) {
			get<8>(y + i, old);
			for (int j = 0; j < 8; j++) v[j] = old[j] + v[j];
		}
		put<8>(y + i, v);
	}
	REST(i, done, n) store(y + i, load(x + i), accumulate);
}

#define CAST(from, to) \
	KERNEL(256, cast_##from##_##to, const int *skip, const from *x, to *y, i64 n, int accumulate) { \
		SKIP(); \
		cast(x, y, n, accumulate); \
	}
CAST(f32, bf16)
CAST(f32, f16)
CAST(bf16, f32)
CAST(f16, f32)

// philox is Philox4x32-10 of counter c.
DEVICE void philox(u32 *c, u32 k0, u32 k1) {
#pragma unroll
	for (int r = 0; r < 10; r++) {
		u32 h0 = __umulhi(0xD2511F53u, c[0]), l0 = 0xD2511F53u * c[0];
		u32 h1 = __umulhi(0xCD9E8D57u, c[2]), l1 = 0xCD9E8D57u * c[2];
		c[0] = h1 ^ c[1] ^ k0, c[1] = l1, c[2] = h0 ^ c[3] ^ k1, c[3] = l0;
		k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
	}
}

// Dropout: which elements stay is a function of the seed, the site, the sample's
// global index and the element's index in it (package vec: Dropout). A counter's 4
// words are for elements 16 apart; a thread takes as many counters in a row as 16
// bytes have elements. Rows of the grid are samples.
template <class T> DEVICE void dropout(const T *x, T *y, i64 samples, i64 elems, const i64 *key, u32 site, u32 threshold, float scale) {
	const int N = Pack<T>::N;
	const i64 counters = (elems + 63) / 64 * 16;
	const u64 seed = (u64)key[0], from = ((u64)key[1] << 40) + (u64)key[2];
	const bool packs = elems % N == 0 && wide(x, y);
	for (i64 s = blockIdx.y; s < samples; s += gridDim.y) {
		const u64 sample = from + (u64)s;
		const T *row = x + s * elems;
		T *out = y + s * elems;
#pragma unroll 1
		for (i64 g = first() * N; g < counters; g += stride() * N) {
			u32 c[N][4];
#pragma unroll
			for (int k = 0; k < N; k++) {
				c[k][0] = (u32)(g + k), c[k][1] = site, c[k][2] = (u32)sample, c[k][3] = (u32)(sample >> 32);
				philox(c[k], (u32)seed, (u32)(seed >> 32));
			}
#pragma unroll
			for (int j = 0; j < 4; j++) {
				const i64 e = g / 16 * 64 + g % 16 + 16 * j;
				if (e >= elems) continue;
				if (packs) {
					Pack<T> p = Pack<T>::at(row + e);
#pragma unroll
					for (int k = 0; k < N; k++) p.v[k] = c[k][j] >= threshold ? p.v[k] * scale : 0;
					p.to(out + e);
					continue;
				}
#pragma unroll
				for (int k = 0; k < N; k++)
					if (e + k < elems) narrow(out + e + k, c[k][j] >= threshold ? load(row + e + k) * scale : 0);
			}
		}
	}
}

#define DROPOUT(T) \
	KERNEL(256, dropout_##T, const int *skip, const T *x, T *y, i64 samples, i64 elems, const i64 *key, u32 site, u32 threshold, float scale) { \
		SKIP(); \
		dropout(x, y, samples, elems, key, site, threshold, scale); \
	}
FOR_FLOATS(DROPOUT)
