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
// SHARED declares `type name[count]` in shared memory, DYNAMIC_SHARED names what
// the launch asked for. The shim poisons both for every block.
#define SHARED(type, name, count) __shared__ type name[count]
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) unsigned char dynamic_shared_[]; type *const name = (type *)dynamic_shared_
// ALIGNED is where the shim checks the address of a wide load or store.
#define ALIGNED(p, to)
#endif

#define SKIP() do { if (skip && *skip != 0) return; } while (0)

#define DEVICE static __device__ __forceinline__

// fma_ is a·b + c with one rounding.
DEVICE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float of_bits(u32 b) { return __uint_as_float(b); }

// load widens an element; as<T> rounds to nearest even.
DEVICE float load(const float *p) { return *p; }
DEVICE float widen(float x) { return x; }
DEVICE float widen(bf16 h) { return of_bits((u32)h.bits << 16); }
DEVICE float load(const bf16 *p) { return widen(*p); }

DEVICE u16 to_bf16(float x) {
	u32 b = bits_of(x);
	if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)(b >> 16) | 0x40;
	return (u16)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

DEVICE void narrow(float *p, float x) { *p = x; }
DEVICE void narrow(bf16 *p, float x) { p->bits = to_bf16(x); }

// store writes or accumulates one element.
template <class T> DEVICE void store(T *p, float x, int accumulate) {
	narrow(p, accumulate ? load(p) + x : x);
}

// first and stride of a thread in a grid-stride loop.
DEVICE i64 first() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 stride() { return (i64)gridDim.x * blockDim.x; }

// Report is a kernel's word about wrong data, in page-locked memory. Any of the
// wrong elements may be the one that is told.
struct Report { int code; int value; i64 index; };

DEVICE void wrong(Report *r, i64 index, int value) {
	r->index = index;
	r->value = value;
	__threadfence_system();
	r->code = 1;
}

// Sums over a warp and a block: the same bits on every thread, by a fixed tree.
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
