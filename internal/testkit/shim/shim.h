// Runs CUDA C kernels on the host. It stands before the text of a source.
//
// A launch runs its blocks one after the other on the calling thread. A block's
// threads are fibers: each runs until it ends or waits at a barrier of the block
// or of its warp. Threads that never wait run one after the other on the same
// fiber, so that a kernel without barriers is a plain loop.
//
// What is not here does not compile, on purpose: floating-point atomics, half
// types, inline PTX.

#define SHIM 1

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __device__
#define __host__
#define __global__ static
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Shared memory is SHARED and DYNAMIC_SHARED, which are poisoned for every block;
// __shared__ itself does not compile.

struct dim3 { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct int2 { int x, y; };
struct float2 { float x, y; };
struct double2 { double x, y; } __align__(16);
struct int4 { int x, y, z, w; } __align__(16);
struct uint4 { unsigned x, y, z, w; } __align__(16);
struct float4 { float x, y, z, w; } __align__(16);

namespace shim {

// Statuses of a launch; 0 is none of them.
enum { DEADLOCK = 1, BAD_LAUNCH = 2, BAD_SHUFFLE = 3, MISALIGNED = 4, BAD_SHARED = 5 };

enum { MAX_THREADS = 1024, STACK = 128 << 10, GUARD = 4096, STATIC_SHARED = 48 << 10, MOST_SHARED = 227 << 10, SITES = 64 };

enum State : uint8_t { NEW, READY, RUNNING, AT_BLOCK, AT_WARP, DONE };

// Fiber is a stack with a saved position.
struct Fiber {
	char *stack;
#if defined(__x86_64__)
	void *sp;
#else
	ucontext_t uc;
#endif
};

struct Thread {
	dim3 id;
	State state;
	int fiber;
	unsigned mask;     // of the warp's barrier that it waits at
	unsigned parity;   // which of the two slots its next exchange uses
	uint64_t slot[2];  // values that it shows to its warp
	int vote;          // what it brings to a barrier of the block
	uint32_t shown[2][8]; // registers that it shows to its warp
	int copies, groups;   // asynchronous copies under way, and groups of them so far
};

// Copy is an asynchronous copy of 4 or 16 bytes that its thread has not waited for: its
// destination is poisoned until then.
struct Copy {
	void *to;
	const void *from; // null: zeros
	int group, bytes;
};
enum { MOST_COPIES = 128 }; // of a thread

struct Block {
	dim3 grid, block, at;
	int n, next, done, waiting;
	int current;                     // thread
	Thread threads[MAX_THREADS];
	Fiber fibers[MAX_THREADS], scheduler;
	int made, idle[MAX_THREADS], idles; // fibers
	int ready[MAX_THREADS], head, readies;
	int votes[3];                    // of the last barrier: or, and, count
	void (*body)(void *);
	void *call;
	int error;
	int order; // 1: threads and blocks from the last to the first
	char *shared;  // dynamic, then static pieces
	size_t dynamic, fixed;
	struct { const void *site; size_t at; } sites[SITES];
	Copy *copies;    // MOST_COPIES for each thread
	int nsites;
};

static thread_local Block *self __attribute__((tls_model("initial-exec")));
static int order;
static char message[512];

#if defined(__x86_64__)
extern "C" void shim_swap_(void **from, void *to) __attribute__((visibility("hidden")));
asm(".text\n.hidden shim_swap_\n.globl shim_swap_\n.type shim_swap_,@function\nshim_swap_:\n"
	"pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
	"movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
	"popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
	".size shim_swap_,.-shim_swap_\n");
static inline void swap(Fiber *from, Fiber *to) { shim_swap_(&from->sp, to->sp); }
#else
static inline void swap(Fiber *from, Fiber *to) { swapcontext(&from->uc, &to->uc); }
#endif

// run_threads is what a fiber does: it runs threads that have not started until
// there are none, then waits for the next block.
static void run_threads() {
	for (;;) {
		Block *b = self;
		int fiber = b->threads[b->current].fiber;
		while (b->next < b->n && !b->error) {
			int t = b->order ? b->n - 1 - b->next : b->next;
			b->next++;
			b->current = t;
			b->threads[t].state = RUNNING;
			b->threads[t].fiber = fiber;
			b->body(b->call);
			b = self;
			b->threads[b->current].state = DONE;
			b->done++;
		}
		b->idle[b->idles++] = fiber;
		swap(&b->fibers[fiber], &b->scheduler);
	}
}

static void fail(int code, const char *what) {
	Block *b = self;
	if (!b->error) {
		b->error = code;
		Thread &t = b->threads[b->current];
		snprintf(message, sizeof message, "%s, at block (%u, %u, %u) thread (%u, %u, %u)", what, b->at.x, b->at.y, b->at.z, t.id.x, t.id.y, t.id.z);
	}
}

// wait leaves the thread until it is made ready.
static void wait() {
	Block *b = self;
	int f = b->threads[b->current].fiber;
	swap(&b->fibers[f], &b->scheduler);
}

// stop leaves the thread for good: the launch has failed.
static void stop(int code, const char *what) {
	fail(code, what);
	for (;;) wait();
}

static void make_ready(Block *b, int t) {
	b->threads[t].state = READY;
	b->ready[(b->head + b->readies++) % MAX_THREADS] = t;
}

// release_block lets all threads of a barrier of the block go.
static void release_block(Block *b) {
	int any = 0, all = 1, count = 0;
	for (int t = 0; t < b->n; t++) {
		if (b->threads[t].state != AT_BLOCK) continue;
		int v = b->threads[t].vote != 0;
		any |= v, all &= v, count += v;
	}
	b->votes[0] = any, b->votes[1] = all, b->votes[2] = count;
	for (int i = 0; i < b->n; i++) {
		int t = b->order ? b->n - 1 - i : i;
		if (b->threads[t].state == AT_BLOCK) make_ready(b, t);
	}
	b->waiting = 0;
}

static void block_barrier(int vote) {
	Block *b = self;
	Thread &t = b->threads[b->current];
	t.state = AT_BLOCK, t.vote = vote;
	b->waiting++;
	wait();
}

// warp_barrier returns when every lane of the mask has come to it.
static void warp_barrier(unsigned mask) {
	Block *b = self;
	int me = b->current, warp = me / 32 * 32;
	if (!(mask >> (me % 32) & 1)) stop(BAD_SHUFFLE, "a warp's operation with a mask that does not name the thread");
	b->threads[me].state = AT_WARP, b->threads[me].mask = mask;
	for (int l = 0; l < 32; l++) {
		if (!(mask >> l & 1)) continue;
		int t = warp + l;
		if (t >= b->n || b->threads[t].state == DONE) stop(BAD_SHUFFLE, "a warp's operation names a thread that has ended");
		if (b->threads[t].state != AT_WARP || b->threads[t].mask != mask) {
			wait();
			return;
		}
	}
	for (int i = 0; i < 32; i++) {
		int l = b->order ? 31 - i : i;
		if (mask >> l & 1) make_ready(b, warp + l);
	}
	wait();
}

// exchange shows a value to the warp and returns the place of the lanes' values:
// those of lane l are in threads[warp + l].slot[parity].
static unsigned exchange(unsigned mask, uint64_t v) {
	Thread &t = self->threads[self->current];
	unsigned p = t.parity;
	t.slot[p] = v;
	t.parity ^= 1;
	warp_barrier(mask);
	return p;
}

static uint64_t lane_value(unsigned mask, unsigned p, int lane) {
	if (!(mask >> lane & 1)) stop(BAD_SHUFFLE, "a shuffle reads a lane that its mask does not name");
	return self->threads[self->current / 32 * 32 + lane].slot[p];
}

template <class T> T shuffle(unsigned mask, T v, int lane, bool keep) {
	static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
	uint64_t bits = 0;
	memcpy(&bits, &v, sizeof v);
	unsigned p = exchange(mask, bits);
	if (keep) return v;
	bits = lane_value(mask, p, lane);
	memcpy(&v, &bits, sizeof v);
	return v;
}

// show shows up to 8 registers to the whole warp and returns the slot that shown reads
// another lane's from.
static unsigned show(const uint32_t *r, int n) {
	Thread &t = self->threads[self->current];
	unsigned p = t.parity;
	memcpy(t.shown[p], r, 4 * (size_t)n);
	t.parity ^= 1;
	warp_barrier(0xffffffffu);
	return p;
}
static const uint32_t *shown(unsigned p, int lane) { return self->threads[self->current / 32 * 32 + lane].shown[p]; }

// copy_async, commit_copies and wait_copies are cp.async and its groups. What was not
// waited for, or is overwritten while others still read it, shows as poison.
static inline void aligned(const void *p, size_t to);
static void copy_async(void *to, const void *from, bool there, int bytes = 16) {
	Block *b = self;
	Thread &t = b->threads[b->current];
	aligned(to, (size_t)bytes), aligned(from, (size_t)bytes);
	if (t.copies == MOST_COPIES) stop(BAD_SHARED, "more asynchronous copies under way than the shim keeps");
	memset(to, 0xff, (size_t)bytes);
	b->copies[b->current * MOST_COPIES + t.copies++] = {to, there ? from : nullptr, t.groups, bytes};
}
static void commit_copies() { self->threads[self->current].groups++; }
static void wait_copies(int left) { // for all groups but the last left
	Block *b = self;
	Thread &t = b->threads[b->current];
	Copy *list = b->copies + b->current * MOST_COPIES;
	int kept = 0;
	for (int i = 0; i < t.copies; i++) {
		if (list[i].group >= t.groups - left) list[kept++] = list[i];
		else if (list[i].from) memcpy(list[i].to, list[i].from, (size_t)list[i].bytes);
		else memset(list[i].to, 0, (size_t)list[i].bytes);
	}
	t.copies = kept;
}

static unsigned ballot(unsigned mask, int v) {
	unsigned p = exchange(mask, v != 0), r = 0;
	for (int l = 0; l < 32; l++)
		if (mask >> l & 1) r |= (unsigned)lane_value(mask, p, l) << l;
	return r;
}

static void *piece(const void *site, size_t bytes) {
	Block *b = self;
	for (int i = 0; i < b->nsites; i++)
		if (b->sites[i].site == site) return b->shared + b->sites[i].at;
	size_t at = (b->fixed + 15) / 16 * 16;
	if (b->nsites == SITES || at + bytes > STATIC_SHARED) stop(BAD_SHARED, "more static shared memory than a block has");
	b->sites[b->nsites].site = site, b->sites[b->nsites].at = MOST_SHARED + at;
	b->nsites++;
	b->fixed = at + bytes;
	return b->shared + MOST_SHARED + at;
}

static int new_fiber(Block *b) {
	int i = b->made++;
	Fiber &f = b->fibers[i];
	f.stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (f.stack == MAP_FAILED || mprotect(f.stack, GUARD, PROT_NONE) != 0) {
		fprintf(stderr, "shim: no memory for a stack\n");
		abort();
	}
#if defined(__x86_64__)
	void **sp = (void **)(f.stack + STACK);
	*--sp = nullptr; // run_threads never returns; keeps its frame aligned
	*--sp = (void *)run_threads;
	for (int r = 0; r < 6; r++) *--sp = nullptr;
	f.sp = sp;
#else
	getcontext(&f.uc);
	f.uc.uc_stack.ss_sp = f.stack;
	f.uc.uc_stack.ss_size = STACK;
	f.uc.uc_link = nullptr;
	makecontext(&f.uc, run_threads, 0);
#endif
	return i;
}

static void describe(Block *b) {
	int at_block = 0, at_warp = 0, ended = 0, one = -1;
	for (int t = 0; t < b->n; t++) {
		at_block += b->threads[t].state == AT_BLOCK;
		at_warp += b->threads[t].state == AT_WARP;
		ended += b->threads[t].state == DONE;
		if (b->threads[t].state != DONE) one = t;
	}
	b->current = one;
	char text[160];
	snprintf(text, sizeof text, "deadlock: %d threads wait at __syncthreads, %d at a warp's operation, %d have ended", at_block, at_warp, ended);
	fail(DEADLOCK, text);
}

static void run_block(Block *b) {
	b->next = b->done = b->waiting = b->readies = b->head = 0;
	for (int t = 0; t < b->n; t++) {
		Thread &th = b->threads[t];
		th.id.x = t % b->block.x, th.id.y = t / b->block.x % b->block.y, th.id.z = t / b->block.x / b->block.y;
		th.state = NEW, th.parity = 0, th.copies = th.groups = 0;
	}
	memset(b->shared, 0xff, b->dynamic);
	memset(b->shared + MOST_SHARED, 0xff, b->fixed);
	b->fixed = 0, b->nsites = 0;
	while (b->done < b->n && !b->error) {
		if (b->next < b->n) {
			int f = b->idles > 0 ? b->idle[--b->idles] : new_fiber(b);
			int t = b->order ? b->n - 1 - b->next : b->next;
			b->current = t; // tells the fiber which one it is
			b->threads[t].fiber = f;
			swap(&b->scheduler, &b->fibers[f]);
			continue;
		}
		if (b->waiting > 0 && b->waiting + b->done == b->n) release_block(b);
		if (b->readies == 0) {
			describe(b);
			break;
		}
		int t = b->ready[b->head];
		b->head = (b->head + 1) % MAX_THREADS, b->readies--;
		b->threads[t].state = RUNNING;
		b->current = t;
		swap(&b->scheduler, &b->fibers[b->threads[t].fiber]);
	}
}

static Block *mine() {
	if (!self) {
		self = (Block *)calloc(1, sizeof(Block));
		self->shared = (char *)aligned_alloc(64, MOST_SHARED + STATIC_SHARED);
		self->fixed = STATIC_SHARED;
		self->copies = (Copy *)calloc((size_t)MAX_THREADS * MOST_COPIES, sizeof(Copy));
	}
	return self;
}

static int run(const char *name, unsigned most, const uint32_t *grid, const uint32_t *block, uint32_t dynamic, void (*body)(void *), void *call) {
	Block *b = mine();
	uint64_t n = (uint64_t)block[0] * block[1] * block[2];
	message[0] = 0;
	if (n == 0 || n > most || n > MAX_THREADS || dynamic > MOST_SHARED || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 ||
		grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535) {
		snprintf(message, sizeof message, "%s: a grid of (%u, %u, %u) blocks of (%u, %u, %u) threads with %u bytes of shared memory; the kernel takes %u threads",
			name, grid[0], grid[1], grid[2], block[0], block[1], block[2], dynamic, most);
		fprintf(stderr, "shim: %s\n", message);
		return BAD_LAUNCH;
	}
	b->grid = {grid[0], grid[1], grid[2]};
	b->block = {block[0], block[1], block[2]};
	b->n = (int)n, b->dynamic = dynamic, b->body = body, b->call = call, b->error = 0, b->order = order;
	uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
	for (uint64_t k = 0; k < blocks && !b->error; k++) {
		uint64_t i = b->order ? blocks - 1 - k : k;
		b->at = {(unsigned)(i % grid[0]), (unsigned)(i / grid[0] % grid[1]), (unsigned)(i / grid[0] / grid[1])};
		run_block(b);
	}
	int error = b->error;
	if (error) {
		char text[512];
		memcpy(text, message, sizeof text);
		snprintf(message, sizeof message, "%.64s: %.400s", name, text);
		fprintf(stderr, "shim: %s\n", message);
		// Stacks of threads that never ended are in use no more.
		for (int i = 0; i < b->made; i++) munmap(b->fibers[i].stack, STACK);
		b->made = b->idles = 0;
	}
	return error;
}

// Parameters lie as C lays them out.
template <class... A> struct Call {
	void (*f)(A...);
	const char *params;
	template <size_t... I> void invoke(std::index_sequence<I...>) {
		size_t off[sizeof...(A) + 1], at = 0;
		const size_t size[] = {sizeof(A)...}, align[] = {alignof(A)...};
		for (size_t i = 0; i < sizeof...(A); i++) {
			at = (at + align[i] - 1) / align[i] * align[i];
			off[i] = at;
			at += size[i];
		}
		f(*(const A *)(params + off[I])...);
	}
	static void body(void *c) { ((Call *)c)->invoke(std::index_sequence_for<A...>{}); }
};

// Bytes of all parameters: C leaves no room after the last.
template <class... A> static uintptr_t parameters(void (*)(A...)) {
	uintptr_t at = 0;
	const size_t size[] = {sizeof(A)...}, align[] = {alignof(A)...};
	for (size_t i = 0; i < sizeof...(A); i++) at = (at + align[i] - 1) / align[i] * align[i] + size[i];
	return at;
}

template <class... A>
static int launch(const char *name, unsigned most, void (*f)(A...), const uint32_t *grid, const uint32_t *block, uint32_t dynamic, const void *params) {
	Call<A...> c{f, (const char *)params};
	return run(name, most, grid, block, dynamic, Call<A...>::body, &c);
}

static inline void aligned(const void *p, size_t to) {
	if ((uintptr_t)p % to) stop(MISALIGNED, "a load or store at an address that is no multiple of its size");
}

// global is aligned of a store to global memory by its own instruction.
static inline void global(const void *p, size_t to) {
	aligned(p, to);
	const char *shared = self->shared;
	if (p >= shared && p < shared + MOST_SHARED + STATIC_SHARED) stop(BAD_SHARED, "a store to global memory at an address of shared memory");
}

} // namespace shim

#define KERNEL(threads, name, ...) \
	static void name(__VA_ARGS__); \
	extern "C" __attribute__((visibility("default"))) int shim_##name(const uint32_t *grid, const uint32_t *block, uint32_t dynamic, const void *params) { \
		return shim::launch(#name, threads, name, grid, block, dynamic, params); \
	} \
	extern "C" __attribute__((visibility("default"))) uintptr_t shim_size_##name() { return shim::parameters(name); } \
	static void name(__VA_ARGS__)

// shim_order sets the order in which blocks, and threads of a block, run: 0 from
// the first, 1 from the last. Results must not depend on it.
extern "C" __attribute__((visibility("default"), used)) void shim_order(int o) { shim::order = o; }
extern "C" __attribute__((visibility("default"), used)) const char *shim_message() { return shim::message; }

#define SHARED(type, name, count) \
	static const char shim_site_##name = 0; \
	type *const name = (type *)shim::piece(&shim_site_##name, sizeof(type) * (count))
#define DYNAMIC_SHARED(type, name) type *const name = (type *)shim::self->shared
#define ALIGNED(p, to) shim::aligned(p, to)

#define threadIdx (shim::self->threads[shim::self->current].id)
#define blockIdx (shim::self->at)
#define blockDim (shim::self->block)
#define gridDim (shim::self->grid)
#define warpSize 32

static inline void __syncthreads() { shim::block_barrier(0); }
static inline int __syncthreads_or(int v) { shim::block_barrier(v); return shim::self->votes[0]; }
static inline int __syncthreads_and(int v) { shim::block_barrier(v); return shim::self->votes[1]; }
static inline int __syncthreads_count(int v) { shim::block_barrier(v); return shim::self->votes[2]; }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::warp_barrier(mask); }

// A source lane outside the segment of width lanes leaves the value as it is.
template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
	int me = shim::self->current % 32;
	return shim::shuffle(mask, v, me / width * width + (lane & (width - 1)), false);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int m, int width = 32) {
	int me = shim::self->current % 32, from = me ^ m;
	return shim::shuffle(mask, v, from & 31, from / width > me / width);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32) {
	int me = shim::self->current % 32, from = me + (int)d;
	return shim::shuffle(mask, v, from & 31, from / width != me / width);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32) {
	int me = shim::self->current % 32, from = me - (int)d;
	return shim::shuffle(mask, v, from & 31, from < me / width * width);
}
static inline unsigned __ballot_sync(unsigned mask, int v) { return shim::ballot(mask, v); }
static inline int __any_sync(unsigned mask, int v) { return shim::ballot(mask, v) != 0; }
static inline int __all_sync(unsigned mask, int v) { return shim::ballot(mask, v) == mask; }

// Integer atomics: their results do not depend on the order.
#define SHIM_ATOMIC(T) \
	static inline T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); } \
	static inline T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); } \
	static inline T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); } \
	static inline T atomicCAS(T *p, T from, T to) { \
		__atomic_compare_exchange_n(p, &from, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
		return from; \
	} \
	static inline T atomicMax(T *p, T v) { \
		T old = *p; \
		while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
		return old; \
	} \
	static inline T atomicMin(T *p, T v) { \
		T old = *p; \
		while (old > v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {} \
		return old; \
	}
SHIM_ATOMIC(int)
SHIM_ATOMIC(unsigned)
SHIM_ATOMIC(unsigned long long)

static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class To, class From> static inline To shim_bits(From v) {
	static_assert(sizeof(To) == sizeof(From), "");
	To r;
	memcpy(&r, &v, sizeof r);
	return r;
}
static inline unsigned __float_as_uint(float x) { return shim_bits<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return shim_bits<float>(x); }
static inline int __float_as_int(float x) { return shim_bits<int>(x); }
static inline float __int_as_float(int x) { return shim_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __double2float_rn(double a) { return (float)a; }
static inline int __float2int_rn(float a) { return (int)__builtin_rintf(a); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
static inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }
