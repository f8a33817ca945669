// What every source starts with. Sources include nothing: NVRTC has no headers
// to give, and the host's shim brings its own before this text.
//
// KERNEL(threads, name, parameters…) { body } is a kernel whose blocks have at
// most that many threads. Its first parameter is the predicate `skip`:
//
//	KERNEL(256, scale_f32, const int *skip, const float *x, float *y, long n, float f) {
//		SKIP();
//		…
//	}
//
// DENSE is KERNEL with the blocks that a multiprocessor shall hold. Without their number
// the compiler looks for a step at which one more fits, if it must put a few words into
// local memory for it.
//
// Arithmetic is compiled without contraction to fused multiply-adds: where one
// is meant, fma_ says so. Then the host's kernels and these give the same bits.

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef float f32;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#ifndef SHIM
#define KERNEL(threads, name, ...) extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define DENSE(threads, blocks, name, ...) extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
// SHARED declares `type name[count]` in shared memory, DYNAMIC_SHARED names what
// the launch asked for. The shim poisons both for every block.
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) unsigned char dynamic_shared_[]; type *const name = (type *)dynamic_shared_
// ALIGNED is where the shim checks the address of a wide load or store.
#define ALIGNED(p, to)
#else
#define DENSE(threads, blocks, name, ...) KERNEL(threads, name, __VA_ARGS__)
#endif

#define SKIP() do { if (skip && *skip != 0) return; } while (0)

#define DEVICE static __device__ __forceinline__

// fma_ is a·b + c with one rounding.
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float of_bits(u32 b) { return __uint_as_float(b); }

// load widens an element; narrow rounds one to nearest even.
DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 h) { return of_bits((u32)h.bits << 16); }
#if defined(SHIM) || __CUDA_ARCH__ < 800
DEVICE float widen(f16 h) {
	u32 sign = (u32)(h.bits & 0x8000) << 16, e = h.bits >> 10 & 0x1f, m = h.bits & 0x3ff;
	if (e == 0x1f) return of_bits(sign | (m ? 0x7fc00000u | m << 13 : 0x7f800000u));
	if (e == 0) return of_bits(sign | bits_of((float)m * (1.0f / (1 << 24))));
	return of_bits(sign | (e + 112) << 23 | m << 13);
}
#else
DEVICE float widen(f16 h) {
	float x;
	asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
	return x;
}
#endif
template <class T> DEVICE float load(const T *p) { return widen(*p); }

// two_bf16 and two_f16 round two elements into a word, the first in its low half. Cards from
// compute capability 8.0 on have an instruction for each rounding; a NaN may get other bits.
#if defined(SHIM) || __CUDA_ARCH__ < 800
DEVICE u16 to_bf16(float x) {
	u32 b = bits_of(x);
	if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)(b >> 16) | 0x40;
	return (u16)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

DEVICE u16 to_f16(float x) {
	u32 b = bits_of(x), sign = b >> 16 & 0x8000;
	b &= 0x7fffffffu;
	if (b > 0x7f800000u) return (u16)(sign | 0x7e00 | (b >> 13 & 0x3ff));
	if (b >= 0x477ff000u) return (u16)(sign | 0x7c00); // 65520 and up round to infinity
	if (b >= 0x38800000u) return (u16)(sign | (b - 0x38000000u + 0xfff + (b >> 13 & 1)) >> 13);
	if (b < 0x33000000u) return (u16)sign; // below half the smallest subnormal
	u32 m = (b & 0x7fffffu) | 0x800000u, shift = 126 - (b >> 23); // in units of 2^-24
	u32 r = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
	if (rest > half || (rest == half && (r & 1))) r++;
	return (u16)(sign | r);
}

DEVICE u32 two_bf16(float low, float high) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE u32 two_f16(float low, float high) { return (u32)to_f16(low) | (u32)to_f16(high) << 16; }
#else
DEVICE u32 two_bf16(float low, float high) {
	u32 w;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
	return w;
}
DEVICE u32 two_f16(float low, float high) {
	u32 w;
	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
	return w;
}
DEVICE u16 to_bf16(float x) { return (u16)two_bf16(x, 0); }
DEVICE u16 to_f16(float x) { return (u16)two_f16(x, 0); }
#endif

DEVICE void narrow(float *p, float x) { *p = x; }
DEVICE void narrow(bf16 *p, float x) { p->bits = to_bf16(x); }
DEVICE void narrow(f16 *p, float x) { p->bits = to_f16(x); }

// f16_at widens the low half of a word.
DEVICE float f16_at(u32 h) {
	f16 v = {(u16)h};
	return widen(v);
}

// store writes or accumulates one element.
template <class T> DEVICE void store(T *p, float x, int accumulate) {
	narrow(p, accumulate ? load(p) + x : x);
}

// write_global writes 8 or 16 bytes of global memory at once. Written as a struct, the
// compiler takes them apart where it has computed the words one by one.
#ifndef SHIM
DEVICE void write_global(void *p, u32 a, u32 b) { asm volatile("st.global.v2.b32 [%0], {%1,%2};" :: "l"(p), "r"(a), "r"(b) : "memory"); }
DEVICE void write_global(void *p, u32 a, u32 b, u32 c, u32 d) {
	asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
#else
DEVICE void write_global(void *p, u32 a, u32 b) {
	shim::global(p, 8);
	*(uint2 *)p = {a, b};
}
DEVICE void write_global(void *p, u32 a, u32 b, u32 c, u32 d) {
	shim::global(p, 16);
	*(uint4 *)p = {a, b, c, d};
}
#endif

// Pack is 16 bytes of elements, widened: at an address, or of words read before.
template <class T> struct Pack;

template <> struct Pack<float> {
	enum { N = 4 };
	float v[4];
	static __device__ __forceinline__ Pack at(const float *p) {
		ALIGNED(p, 16);
		float4 u = *(const float4 *)p;
		return {{u.x, u.y, u.z, u.w}};
	}
	static __device__ __forceinline__ Pack of(uint4 u) { return {{of_bits(u.x), of_bits(u.y), of_bits(u.z), of_bits(u.w)}}; }
	__device__ __forceinline__ void to(float *p) const {
		write_global(p, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
	}
};

template <> struct Pack<bf16> {
	enum { N = 8 };
	float v[8];
	static __device__ __forceinline__ Pack at(const bf16 *p) {
		ALIGNED(p, 16);
		return of(*(const uint4 *)p);
	}
	static __device__ __forceinline__ Pack of(uint4 u) {
		return {{of_bits(u.x << 16), of_bits(u.x & 0xffff0000u), of_bits(u.y << 16), of_bits(u.y & 0xffff0000u),
			of_bits(u.z << 16), of_bits(u.z & 0xffff0000u), of_bits(u.w << 16), of_bits(u.w & 0xffff0000u)}};
	}
	__device__ __forceinline__ void to(bf16 *p) const {
		write_global(p, two(0), two(2), two(4), two(6));
	}
	__device__ __forceinline__ u32 two(int i) const { return two_bf16(v[i], v[i + 1]); }
};

template <> struct Pack<f16> {
	enum { N = 8 };
	float v[8];
	static __device__ __forceinline__ Pack at(const f16 *p) {
		ALIGNED(p, 16);
		return of(*(const uint4 *)p);
	}
	static __device__ __forceinline__ Pack of(uint4 u) {
		return {{f16_at(u.x), f16_at(u.x >> 16), f16_at(u.y), f16_at(u.y >> 16), f16_at(u.z), f16_at(u.z >> 16), f16_at(u.w), f16_at(u.w >> 16)}};
	}
	__device__ __forceinline__ void to(f16 *p) const {
		write_global(p, two_f16(v[0], v[1]), two_f16(v[2], v[3]), two_f16(v[4], v[5]), two_f16(v[6], v[7]));
	}
};

// Words of a group of elements that are read or written at once: 8 or 16 bytes.
template <int W> struct Words;
template <> struct Words<2> {
	u32 w[2];
	static __device__ __forceinline__ Words at(const void *p) {
		ALIGNED(p, 8);
		uint2 u = *(const uint2 *)p;
		return {{u.x, u.y}};
	}
	__device__ __forceinline__ void to(void *p) const { write_global(p, w[0], w[1]); }
	__device__ __forceinline__ void to_shared(void *p) const {
		ALIGNED(p, 8);
		*(uint2 *)p = {w[0], w[1]};
	}
};
template <> struct Words<4> {
	u32 w[4];
	static __device__ __forceinline__ Words at(const void *p) {
		ALIGNED(p, 16);
		uint4 u = *(const uint4 *)p;
		return {{u.x, u.y, u.z, u.w}};
	}
	__device__ __forceinline__ void to(void *p) const { write_global(p, w[0], w[1], w[2], w[3]); }
	__device__ __forceinline__ void to_shared(void *p) const {
		ALIGNED(p, 16);
		*(uint4 *)p = {w[0], w[1], w[2], w[3]};
	}
};

// get widens N elements that lie together, put rounds them and writes them to global
// memory, put_shared to shared memory. Their address is a multiple of their size, or of
// 16 bytes where they have more.
template <int N> DEVICE void put_shared(float *p, const float *v) {
#pragma unroll
	for (int k = 0; k < N; k += 4) {
		Words<4> u = {{bits_of(v[k]), bits_of(v[k + 1]), bits_of(v[k + 2]), bits_of(v[k + 3])}};
		u.to_shared(p + k);
	}
}
template <int N> DEVICE void get(const float *p, float *v) {
#pragma unroll
	for (int k = 0; k < N; k += 4) {
		Words<4> u = Words<4>::at(p + k);
#pragma unroll
		for (int j = 0; j < 4; j++) v[k + j] = of_bits(u.w[j]);
	}
}
template <int N> DEVICE void put(float *p, const float *v) {
#pragma unroll
	for (int k = 0; k < N; k += 4) {
		Words<4> u = {{bits_of(v[k]), bits_of(v[k + 1]), bits_of(v[k + 2]), bits_of(v[k + 3])}};
		u.to(p + k);
	}
}
template <int N> DEVICE void get(const bf16 *p, float *v) {
	Words<N / 2> u = Words<N / 2>::at(p);
#pragma unroll
	for (int k = 0; k < N / 2; k++) v[2 * k] = of_bits(u.w[k] << 16), v[2 * k + 1] = of_bits(u.w[k] & 0xffff0000u);
}
template <int N> DEVICE void put(bf16 *p, const float *v) {
	Words<N / 2> u;
#pragma unroll
	for (int k = 0; k < N / 2; k++) u.w[k] = two_bf16(v[2 * k], v[2 * k + 1]);
	u.to(p);
}
template <int N> DEVICE void get(const f16 *p, float *v) {
	Words<N / 2> u = Words<N / 2>::at(p);
#pragma unroll
	for (int k = 0; k < N / 2; k++) v[2 * k] = f16_at(u.w[k]), v[2 * k + 1] = f16_at(u.w[k] >> 16);
}
template <int N> DEVICE void put(f16 *p, const float *v) {
	Words<N / 2> u;
#pragma unroll
	for (int k = 0; k < N / 2; k++) u.w[k] = two_f16(v[2 * k], v[2 * k + 1]);
	u.to(p);
}

// copy_async starts to copy 4, 8 or 16 bytes to shared memory, or zeros where there is
// nothing. commit_copies ends a group of them; wait_copies waits for all groups of the
// thread but the last LEFT. Compute capability 7 has no such copies: it waits for each.
#ifdef SHIM
template <int BYTES> DEVICE void copy_async(void *to, const void *from, bool there) { shim::copy_async(to, from, there, BYTES); }
DEVICE void commit_copies() { shim::commit_copies(); }
template <int LEFT> DEVICE void wait_copies() { shim::wait_copies(LEFT); }
#else
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
#if __CUDA_ARCH__ >= 800
template <int BYTES> DEVICE void copy_async(void *to, const void *from, bool there) {
	if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
	else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
#else
template <int BYTES> DEVICE void copy_async(void *to, const void *from, bool there) {
#pragma unroll
	for (int i = 0; i < BYTES / 4; i++) ((volatile u32 *)to)[i] = there ? ((const u32 *)from)[i] : 0u;
}
DEVICE void commit_copies() {}
template <int LEFT> DEVICE void wait_copies() {}
#endif
#endif

// wide says whether all addresses can be read 16 bytes at a time. Results never
// depend on it.
DEVICE bool wide(const void *a) { return ((u64)a & 15) == 0; }
template <class... P> DEVICE bool wide(const void *a, P... more) { return wide(a) && wide(more...); }

// quads says it of four elements at a time.
template <class T> DEVICE bool quads(const T *a) { return ((u64)a & (4 * sizeof(T) - 1)) == 0; }

// first and stride of a thread in a grid-stride loop.
DEVICE i64 first() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 stride() { return (i64)gridDim.x * blockDim.x; }

// STRIDED is a thread's share of n in a grid-stride loop. It is not unrolled: to know
// its turns, every thread would divide 64-bit numbers.
#define STRIDED(i, n) _Pragma("unroll 1") for (i64 i = first(); i < (n); i += stride())

// Report is a kernel's word about wrong data, in page-locked memory. Any of the
// wrong elements may be the one that is told.
struct Report { int code; int value; i64 index; };

DEVICE void wrong(Report *r, i64 index, int value) {
	r->index = index;
	r->value = value;
	__threadfence_system();
	r->code = 1;
}

// Sums over a warp and a block of whole warps: by a fixed tree, the same bits on
// every thread. A block's needs 32 elements of shared memory, which it leaves
// free for the next.
DEVICE float warp_sum(float x) {
	for (int m = 16; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
	return x;
}

DEVICE float warp_max(float x) {
	for (int m = 16; m > 0; m >>= 1) {
		float y = __shfl_xor_sync(0xffffffffu, x, m);
		x = y > x ? y : x;
	}
	return x;
}

DEVICE float block_sum(float x, float *partial) {
	x = warp_sum(x);
	int warps = blockDim.x / 32;
	if (warps == 1) return x;
	if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
	__syncthreads();
	x = (int)(threadIdx.x % 32) < warps ? partial[threadIdx.x % 32] : 0.0f;
	x = warp_sum(x);
	__syncthreads();
	return x;
}

// Sums in double have the CPU's bits: BLOCK elements in BLOCK_LANES sums of every 16th,
// which are added by halves, lane l taking l+8, then l+4 ….
enum { BLOCK = 256, BLOCK_LANES = 16 };

// sum_block is the sum of f of the block's elements from b on, those below hi. BLOCK_LANES
// by a pack's elements threads side by side have it, each neighbouring lanes, and the
// first gets it. packs says that x can be read 16 bytes at a time at b. All of a warp come
// here together.
template <class T, class F> DEVICE double sum_block(const T *x, i64 b, i64 hi, bool packs, F f) {
	const int N = Pack<T>::N, THREADS = BLOCK_LANES / N, READS = 8; // reads under way
	const int lane = threadIdx.x % THREADS * N;
	double v[N] = {0};
	if (packs && b + BLOCK <= hi) {
		const T *p = x + b + lane;
#pragma unroll 1
		for (int k = 0; k < BLOCK; k += READS * BLOCK_LANES) {
			uint4 u[READS];
#pragma unroll
			for (int r = 0; r < READS; r++) {
				ALIGNED(p + k + r * BLOCK_LANES, 16);
				u[r] = *(const uint4 *)(p + k + r * BLOCK_LANES);
			}
#pragma unroll
			for (int r = 0; r < READS; r++) {
				const Pack<T> e = Pack<T>::of(u[r]);
#pragma unroll
				for (int j = 0; j < N; j++) v[j] += f((double)e.v[j]);
			}
		}
	} else {
#pragma unroll
		for (int j = 0; j < N; j++)
#pragma unroll 1
			for (i64 i = b + lane + j; i < b + BLOCK && i < hi; i += BLOCK_LANES) v[j] += f((double)load(x + i));
	}
#pragma unroll
	for (int h = BLOCK_LANES / 2; h >= N; h /= 2)
#pragma unroll
		for (int j = 0; j < N; j++) v[j] += __shfl_down_sync(0xffffffffu, v[j], h / N, THREADS);
#pragma unroll
	for (int h = N / 2; h > 0; h /= 2)
#pragma unroll
		for (int j = 0; j < h; j++) v[j] += v[j + h];
	return v[0];
}

// get and put of two elements of 8 bytes.
template <int N> DEVICE void get(const double *p, double *v) {
	static_assert(N == 2, "16 bytes");
	ALIGNED(p, 16);
	const double2 u = *(const double2 *)p;
	v[0] = u.x, v[1] = u.y;
}
template <int N> DEVICE void get(const u64 *p, u64 *v) {
	const Words<2 * N> u = Words<2 * N>::at(p);
#pragma unroll
	for (int j = 0; j < N; j++) v[j] = (u64)u.w[2 * j] | (u64)u.w[2 * j + 1] << 32;
}
template <int N> DEVICE void put(u64 *p, const u64 *v) {
	static_assert(N == 2, "16 bytes");
	write_global(p, (u32)v[0], (u32)(v[0] >> 32), (u32)v[1], (u32)(v[1] >> 32));
}
template <int N> DEVICE void put(double *p, const double *v) {
	const u64 w[2] = {(u64)__double_as_longlong(v[0]), (u64)__double_as_longlong(v[1])};
	put<N>((u64 *)p, w);
}

// Sums of n addends, element by element; read(k, v) gives N elements of addend k.
//
// sum_tree adds in the tree over the addend's index. As a binary counter does, it joins
// neighbours of one size as they come, and what is left from the right: four addends at a
// time in registers, which have no index; what waits lies in shared memory, of every thread
// its own, as many levels as n/4 has binary digits.
enum { TREE_THREADS = 64 };

template <int N, class S, class Read> DEVICE void sum_tree(S *waiting, int n, const Read &read, S *v) {
	S *part = waiting + threadIdx.x;
	int top = 0;
#pragma unroll 1
	for (int k = 0; k + 4 <= n; k += 4) {
		S a[N], b[N], c[N], d[N];
		read(k, a), read(k + 1, b), read(k + 2, c), read(k + 3, d);
#pragma unroll
		for (int j = 0; j < N; j++) v[j] = (a[j] + b[j]) + (c[j] + d[j]);
#pragma unroll 1
		for (int m = k / 4 + 1; !(m & 1); m >>= 1) {
			top--;
#pragma unroll
			for (int j = 0; j < N; j++) v[j] = part[(top * N + j) * TREE_THREADS] + v[j];
		}
		if (k + 4 < n) {
#pragma unroll
			for (int j = 0; j < N; j++) part[(top * N + j) * TREE_THREADS] = v[j];
			top++;
		}
	}
	const int left = n % 4;
	if (left > 0) {
		read(n - left, v);
#pragma unroll 1
		for (int k = n - left + 1; k < n; k++) {
			S a[N];
			read(k, a);
#pragma unroll
			for (int j = 0; j < N; j++) v[j] = v[j] + a[j];
		}
	}
#pragma unroll 1
	while (top > 0) {
		top--;
#pragma unroll
		for (int j = 0; j < N; j++) v[j] = part[(top * N + j) * TREE_THREADS] + v[j];
	}
}

// sum_in_order adds addends 1 to n-1 to v, from left to right.
template <int N, class S, class Read> DEVICE void sum_in_order(int n, const Read &read, S *v) {
	const int READS = 16 / N; // under way
	int k = 1;
#pragma unroll 1
	for (; k + READS <= n; k += READS) {
		S a[READS][N];
#pragma unroll
		for (int r = 0; r < READS; r++) read(k + r, a[r]);
#pragma unroll
		for (int r = 0; r < READS; r++)
#pragma unroll
			for (int j = 0; j < N; j++) v[j] = v[j] + a[r][j];
	}
#pragma unroll 1
	for (; k < n; k++) {
		S a[N];
		read(k, a);
#pragma unroll
		for (int j = 0; j < N; j++) v[j] = v[j] + a[j];
	}
}

// Functions with the bits of the CPU's: fixed polynomials of package num.

DEVICE float sqrt_(float x) { return __fsqrt_rn(x); }

DEVICE float pow2_(int n) { return of_bits((u32)(n + 127) << 23); }

DEVICE float exp_(float x) {
	if (x > 88.72284f) return of_bits(0x7f800000u);
	if (x < -103.97f) return 0;
	if (x != x) return x;
	float n = rintf(x * 1.44269504088896341f);
	float r = fma_(n, -0.693359375f, x);
	r = fma_(n, 2.12194440e-4f, r);
	float p = fma_(1.9875691500e-4f, r, 1.3981999507e-3f);
	p = fma_(p, r, 8.3334519073e-3f);
	p = fma_(p, r, 4.1665795894e-2f);
	p = fma_(p, r, 1.6666665459e-1f);
	p = fma_(p, r, 5.0000001201e-1f);
	float y = fma_(p, r * r, r) + 1;
	// Two factors, so that only the second can round (a subnormal result).
	int i = (int)n, h = i >> 1;
	return y * pow2_(h) * pow2_(i - h);
}

DEVICE float sigmoid_(float x) { return 1 / (1 + exp_(-x)); }

// Types that a kernel is made for, and pairs: of values and of gradients.
#define FOR_FLOATS(M) M(f32) M(bf16) M(f16)
#define FOR_PAIRS(M) M(f32, f32) M(bf16, bf16) M(bf16, f32) M(f16, f16) M(f16, f32)
