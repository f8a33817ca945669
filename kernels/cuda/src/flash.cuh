// Attention on the tensor cores of compute capability 8.0 and later, for values of 16
// bits and heads of D elements: see bind_flash.go. Scores never leave a multiprocessor
// (Dao 2023: FlashAttention-2).
//
// Tiles are of 64 queries by 64 keys, in shared memory as they are stored, filled by
// asynchronous copies; rows are 8 elements apart more than they are long, so that the
// 8 rows of a matrix of ldmatrix lie in different banks. Products are of 16 bits,
// sums of fp32; probabilities and gradients of scores are rounded to 16 bits between
// two products.
//
// What the hardware does as a warp is a function here, each with a twin in plain C++
// that the shim runs: fragments lie as the PTX manual draws them (mma.m16n8k16).

#define TILE 64
#define FORWARD_THREADS 128
#define BACKWARD_THREADS 128
#define NEG_INF of_bits(0xff800000u)
#define LOG2E 1.44269504088896341f

// mma adds to d (16×8) the product of a (16×16) and b (16×8). Lane 4g+t of the warp
// has d of rows g and g+8, columns 2t and 2t+1. ldmatrix loads four 8×8 matrices,
// lane l giving the address of row l%8 of matrix l/8; lane 4g+t gets columns 2t and
// 2t+1 of row g of each, or with TRANSPOSED rows 2t and 2t+1 of column g. exp2_ is
// 2^x within 2 units of the last place.
enum { PLAIN, TRANSPOSED };

#ifndef SHIM
DEVICE void mma(float *d, const u32 *a, const u32 *b, bf16) {
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma(float *d, const u32 *a, const u32 *b, f16) {
	asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
		: "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <int HOW> DEVICE void ldmatrix(u32 *r, const void *row) {
	if (HOW == PLAIN)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE float exp2_(float x) {
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}
// thread and block are threadIdx.x and blockIdx.x, asked for anew: what is computed from
// them is not kept in registers from outside a loop, or over one.
DEVICE int thread() {
	int t;
	asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
	return t;
}
DEVICE int block() {
	int b;
	asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
	return b;
}
// discard drops a line of 128 bytes of global memory from the cache: its bytes are of no use,
// so that they are not written to memory.
DEVICE void discard(float *line) { asm volatile("discard.global.L2 [%0], 128;" :: "l"(line) : "memory"); }
#else
template <class T> DEVICE T half_of(u32 word, int i) {
	T v = {(u16)(word >> 16 * i)};
	return v;
}
template <class T> static void mma(float *d, const u32 *a, const u32 *b, T) {
	const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
	const u32 slot = shim::show(mine, 6);
	const int lane = threadIdx.x % 32;
	for (int i = 0; i < 4; i++) {
		const int row = lane / 4 + 8 * (i / 2), col = 2 * (lane % 4) + i % 2;
		for (int k = 0; k < 16; k++) {
			const u32 wa = shim::shown(slot, row % 8 * 4 + k % 8 / 2)[row / 8 + 2 * (k / 8)];
			const u32 wb = shim::shown(slot, col * 4 + k % 8 / 2)[4 + k / 8];
			d[i] = fma_(widen(half_of<T>(wa, k % 2)), widen(half_of<T>(wb, k % 2)), d[i]);
		}
	}
}
template <int HOW> static void ldmatrix(u32 *r, const void *row) {
	ALIGNED(row, 16);
	u32 mine[2];
	memcpy(mine, &row, sizeof row);
	const u32 slot = shim::show(mine, 2);
	const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
	for (int m = 0; m < 4; m++) {
		u16 pair[2];
		for (int i = 0; i < 2; i++) {
			const int at = HOW == PLAIN ? g : 2 * t + i, col = HOW == PLAIN ? 2 * t + i : g;
			const u16 *p;
			memcpy(&p, shim::shown(slot, 8 * m + at), sizeof p);
			pair[i] = p[col];
		}
		r[m] = (u32)pair[0] | (u32)pair[1] << 16;
	}
	__syncwarp(); // all have read before one goes on to write
}
DEVICE float exp2_(float x) { return exp2f(x); }
DEVICE int thread() { return threadIdx.x; }
DEVICE int block() { return blockIdx.x; }
// What is read of a line that was discarded is NaN.
static void discard(float *line) {
	ALIGNED(line, 128);
	for (int i = 0; i < 32; i++) line[i] = of_bits(0x7fc00000u);
}
#endif

DEVICE u32 two(float low, float high, bf16) { return two_bf16(low, high); }
DEVICE u32 two(float low, float high, f16) { return two_f16(low, high); }

// Shape of an attention: group heads share keys and values.
struct Shape {
	int batch, seq, heads, group;
	float scale;
	int causal;
};

// Tile is 64 rows of D elements in shared memory, and what a warp takes of it.
template <class T, int D> struct Tile {
	enum { LD = D + 8, SIZE = TILE * LD, LANES = D > 64 ? 16 : 8 };

	// fill starts to copy rows from row on; those from rows on are zeros. A thread keeps
	// its columns, and its rows are a fixed step apart, for one address of each.
	template <int THREADS> static __device__ __forceinline__ void fill(T *to, const T *from, i64 ld, int row, int rows) {
		const int STEP = THREADS / LANES, t = thread(), c = t % LANES * 8;
		if (c >= D) return;
		int r = t / LANES;
		const T *p = from + (row + r) * ld + c;
		T *q = to + r * LD + c;
#pragma unroll
		for (int k = 0; k < TILE / STEP; k++, r += STEP, p += STEP * ld, q += STEP * LD) copy_async<16>(q, p, row + r < rows);
	}
	// drain writes rows of the tile to memory, a thread of so many a time 16 bytes.
	static __device__ __forceinline__ void drain(T *to, i64 ld, int row, int rows, const T *from, int n, int thread, int threads) {
		for (int i = thread; i < n * (D / 8); i += threads) {
			const int r = i / (D / 8), c = i % (D / 8) * 8;
			if (row + r < rows) Words<4>::at(from + r * LD + c).to(to + (i64)(row + r) * ld + c);
		}
	}
};

// Fragments of tiles whose rows are LD apart. left is a 16×16 factor of rows m and
// columns k on; left_of_columns the transpose of rows k and columns m on; right is two
// 16×8 factors whose columns are rows n on; right_of_rows is one of 32×8: its rows are
// rows k on, in the halves of r.
template <int LD, class T> DEVICE void left(u32 *r, const T *s, int m, int k) {
	const int lane = threadIdx.x % 32;
	ldmatrix<PLAIN>(r, s + (m + lane % 16) * LD + k + lane / 16 * 8);
}
template <int LD, class T> DEVICE void left_of_columns(u32 *r, const T *s, int m, int k) {
	const int lane = threadIdx.x % 32;
	ldmatrix<TRANSPOSED>(r, s + (k + lane / 16 * 8 + lane % 8) * LD + m + lane / 8 % 2 * 8);
}
template <int LD, class T> DEVICE void right(u32 *r, const T *s, int n, int k) {
	const int lane = threadIdx.x % 32;
	ldmatrix<PLAIN>(r, s + (n + lane / 16 * 8 + lane % 8) * LD + k + lane / 8 % 2 * 8);
}
template <int LD, class T> DEVICE void right_of_rows(u32 *r, const T *s, int k, int n) {
	ldmatrix<TRANSPOSED>(r, s + (k + threadIdx.x % 32) * LD + n);
}

template <int N> DEVICE void clear(float (&a)[N][4]) {
#pragma unroll
	for (int n = 0; n < N; n++)
#pragma unroll
		for (int i = 0; i < 4; i++) a[n][i] = 0;
}

// Sums and maxima over the four lanes that share a row.
DEVICE float row_max(float x) {
#pragma unroll
	for (int m = 1; m < 4; m *= 2) {
		x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
	}
	return x;
}
DEVICE float row_sum(float x) {
#pragma unroll
	for (int m = 1; m < 4; m *= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
	return x;
}

// Softmax of the rows g and g+8 of a warp's 16, along tiles of keys.
template <int D> struct Softmax {
	float most[2], sum[2]; // sum: of the lane's own columns

	// next turns a tile's scores into probabilities, relative to the largest so far,
	// and rescales what was summed with the largest before.
	__device__ __forceinline__ void next(float (&s)[8][4], float (&o)[D / 8][4], float scale) {
#pragma unroll
		for (int h = 0; h < 2; h++) {
			float top = most[h];
#pragma unroll
			for (int j = 0; j < 8; j++)
#pragma unroll
				for (int i = 2 * h; i < 2 * h + 2; i++) top = fmaxf(top, s[j][i]);
			top = row_max(top);
			const float base = top == NEG_INF ? 0 : top * scale, again = exp2_(fma_(most[h], scale, -base));
			most[h] = top;
			float part = 0;
#pragma unroll
			for (int j = 0; j < 8; j++)
#pragma unroll
				for (int i = 2 * h; i < 2 * h + 2; i++) {
					s[j][i] = exp2_(fma_(s[j][i], scale, -base));
					part += s[j][i];
				}
			sum[h] = fma_(sum[h], again, part);
#pragma unroll
			for (int n = 0; n < D / 8; n++) o[n][2 * h] *= again, o[n][2 * h + 1] *= again;
		}
	}
};

// hide takes scores of keys beyond the sequence, or later than the query, out.
template <int N> DEVICE void hide(float (&s)[N][4], int query, int key, const Shape &p) {
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const int most = p.causal && query + 8 * h < p.seq ? query + 8 * h : p.seq - 1, last = most - key - 2 * (thread() % 4);
#pragma unroll
		for (int j = 0; j < N; j++)
#pragma unroll
			for (int i = 0; i < 2; i++)
				if (8 * j + i > last) s[j][2 * h + i] = NEG_INF;
	}
}

// Place is a block's tile of a head. Blocks go over groups of at_once heads, whose keys and
// values then stay in the cache; in a group the longest tiles come first.
struct Place {
	int head, batch, tile, last; // last: tile of keys
	__device__ __forceinline__ Place(const Shape &p, int at_once, u32 x) {
		const u32 heads = (u32)(p.batch * p.heads), tiles = (u32)((p.seq + TILE - 1) / TILE);
		const u32 begin = x / (at_once * tiles) * at_once, n = min((u32)at_once, heads - begin), rest = x - begin * tiles, from_end = rest / n;
		const u32 which = begin + rest - from_end * n;
		batch = (int)(which / (u32)p.heads), head = (int)which - batch * p.heads;
		last = (int)tiles - 1, tile = last - (int)from_end;
		if (p.causal) last = tile;
	}
};

// forward: q (rows ldq apart), k, v (ldkv) → y (heads·D), lse (batch, heads, seq). A
// block has a tile of queries of a head, a warp 16 of them.
template <class T, int D> DEVICE void forward(const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, int at_once, const Shape &p) {
	typedef Tile<T, D> S;
	DYNAMIC_SHARED(T, qs);
	T *ks = qs + S::SIZE, *vs = ks + S::SIZE;
	const Place place(p, at_once, blockIdx.x);
	const int last = place.last;
	{
		const i64 row = (i64)place.batch * p.seq;
		S::template fill<FORWARD_THREADS>(qs, q + (row * ldq + (i64)place.head * D), ldq, place.tile * TILE, p.seq);
		k += row * ldkv + (i64)(place.head / p.group) * D;
		v += row * ldkv + (i64)(place.head / p.group) * D;
	}
	S::template fill<FORWARD_THREADS>(ks, k, ldkv, 0, p.seq);
	commit_copies();

	float o[D / 8][4];
	clear(o);
	Softmax<D> soft = {{NEG_INF, NEG_INF}, {0, 0}};
	const float scale = p.scale * LOG2E;
	for (int at = 0; at <= last; at++) {
		wait_copies<0>();
		__syncthreads(); // keys are here, and nobody reads values any more
		S::template fill<FORWARD_THREADS>(vs, v, ldkv, at * TILE, p.seq);
		commit_copies();
		float s[8][4];
		clear(s);
#pragma unroll
		for (int d = 0; d < D; d += 16) {
			u32 a[4], b[4];
			left<S::LD>(a, qs, 16 * (threadIdx.x / 32), d);
#pragma unroll
			for (int j = 0; j < 4; j++) {
				right<S::LD>(b, ks, 16 * j, d);
				mma(s[2 * j], a, b, T()), mma(s[2 * j + 1], a, b + 2, T());
			}
		}
		wait_copies<0>();
		__syncthreads(); // values are here, and nobody reads keys any more
		if (at < last) S::template fill<FORWARD_THREADS>(ks, k, ldkv, (at + 1) * TILE, p.seq);
		commit_copies();
		if (at == last) {
			const int t = thread(); // if causal, the tile's keys are its queries
			hide(s, at * TILE + 16 * (t / 32) + t % 32 / 4, at * TILE, p);
		}
		soft.next(s, o, scale);
#pragma unroll
		for (int j = 0; j < 8; j += 4) { // 32 keys
			const u32 a[8] = {two(s[j][0], s[j][1], T()), two(s[j][2], s[j][3], T()), two(s[j + 1][0], s[j + 1][1], T()), two(s[j + 1][2], s[j + 1][3], T()),
				two(s[j + 2][0], s[j + 2][1], T()), two(s[j + 2][2], s[j + 2][3], T()), two(s[j + 3][0], s[j + 3][1], T()), two(s[j + 3][2], s[j + 3][3], T())};
#pragma unroll
			for (int n = 0; n < D / 8; n++) {
				if (n % 4 == 0) __syncwarp();
				u32 b[4];
				right_of_rows<S::LD>(b, vs, 8 * j, 8 * n);
				mma(o[n], a, b, T()), mma(o[n], a + 4, b + 2, T());
			}
		}
	}
	const Place here(p, at_once, block());
	const int t = thread(), warp = t / 32, lane = t % 32, query = here.tile * TILE + 16 * warp + lane / 4;
	T *mine = qs + 16 * warp * S::LD; // the warp's queries, which it needs no more
	__syncwarp();
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float sum = row_sum(soft.sum[h]), factor = 1 / sum;
		if (lane % 4 == 0 && query + 8 * h < p.seq) lse[((i64)here.batch * p.heads + here.head) * p.seq + query + 8 * h] = fma_(soft.most[h], p.scale, logf(sum));
#pragma unroll
		for (int n = 0; n < D / 8; n++)
			*(u32 *)(mine + (lane / 4 + 8 * h) * S::LD + 8 * n + 2 * (lane % 4)) = two(o[n][2 * h] * factor, o[n][2 * h + 1] * factor, T());
	}
	__syncwarp();
	const i64 ldy = (i64)p.heads * D;
	S::drain(y + (i64)here.batch * p.seq * ldy + (i64)here.head * D, ldy, here.tile * TILE + 16 * warp, p.seq, mine, 16, lane, 32);
}

// delta (batch, heads, seq) = Σ dy·y of every query, of which there are fewer than 2^31:
// 16 lanes each. It also sets the backward's counters to 0.
template <class T, int D> DEVICE void deltas(const T *y, const T *dy, float *delta, u32 *counters, int counts, const Shape &p) {
	STRIDED(i, counts) counters[i] = 0;
	const u32 i = blockIdx.x * (BACKWARD_THREADS / 16) + threadIdx.x / 16, n = (u32)(p.batch * p.seq * p.heads); // in memory's order
	const int c = threadIdx.x % 16 * 8;
	float sum = 0;
	if (i < n && c < D) {
		float a[8], b[8];
		get<8>(y + (i64)i * D + c, a), get<8>(dy + (i64)i * D + c, b);
#pragma unroll
		for (int j = 0; j < 8; j++) sum = fma_(a[j], b[j], sum);
	}
#pragma unroll
	for (int m = 8; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
	if (i >= n || c != 0) return;
	const u32 row = i / (u32)p.heads, head = i - row * (u32)p.heads, batch = row / (u32)p.seq;
	delta[((i64)batch * p.heads + head) * p.seq + (row - batch * (u32)p.seq)] = sum;
}

// Turns are whose turn it is to add to a tile of dq: those of keys, in order. wait
// returns when turn n has come; pass ends it. Blocks take their work by tickets, those of a
// head in the order of its tiles of keys, so that who is waited for runs already.
DEVICE void wait_turn(u32 *turn, u32 n) {
#ifdef SHIM
	if (*turn != n) shim::stop(shim::DEADLOCK, "a block waits for a turn that blocks before it did not pass");
#else
	if (threadIdx.x == 0) {
		u32 now;
		asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
#pragma unroll 1
		while (now != n) {
			__nanosleep(100);
			asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
		}
	}
#endif
	__syncthreads();
}
DEVICE void pass_turn(u32 *turn, u32 n) {
	__syncthreads();
	if (thread() == 0)
#ifdef SHIM
		*turn = n + 1;
#else
		asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(turn), "r"(n + 1) : "memory");
#endif
}

// Order is that in which blocks take tiles of keys. With spread 0, the first tiles of all
// heads come first. Else a head's next tile comes spread heads later (or, one of the two
// being 1, stride tiles of a head together take one head's time): few heads are under way at
// once, and their queries, gradients and sums stay in the cache; but a head's tiles are as
// far apart as one has to be behind the other to find its turn come.
struct Order {
	u32 spread, stride;
	// take returns the next head, of all batches, and tile. There are as many of them as
	// blocks; a ticket of no tile is one more.
	__device__ __forceinline__ u32 take(u32 *counter, u32 heads, u32 tiles, u32 *tile) const {
		const u32 per = spread == 0 ? heads : (tiles + stride - 1) / stride;
		u32 head;
		do {
			const u32 x = atomicAdd(counter, 1u), row = x / per, rest = x - row * per;
			if (spread == 0) *tile = row, head = rest;
			else {
				*tile = rest * stride + row % stride;
				head = row >= spread * *tile ? (row - spread * *tile) / stride : heads;
			}
		} while (head >= heads || *tile >= tiles);
		return head;
	}
};

// Backward is what the kernel takes.
template <class T> struct Backward {
	const T *q, *k, *v, *dy;
	i64 ldq, ldkv;
	const float *lse, *delta;
	float *sums;   // of dq, by tile of queries, as fragments lie
	u32 *counters; // the ticket, then turns by tile of queries
	T *dq, *dk, *dv;
	i64 lddq, lddkv;
};

// Work is a tile of keys, with the tiles of queries that see it. A warp has 16 keys and
// takes every query: its probabilities and gradients of scores, keys by queries, come out
// of a product as the next product's left factor has them, and stay in registers. Only
// dq, whose sum goes over keys, needs those of all warps, in shared memory.
template <class T, int D> struct Work {
	typedef Tile<T, D> S;
	enum { NS = D / 8, LP = TILE + 8 }; // 8-column pieces of a row, row of the tile of scores' gradients

	const Backward<T> &b;
	const Shape &p;
	T *ks, *vs, *queries, *ds; // a stage of queries has gradients of y after them
	float *stats; // of the queries, by stage: lse, delta
	const volatile int *place; // batch, head of keys, tile, tiles of a head: read where they are used, not kept in registers

	__device__ __forceinline__ int batch() const { return place[0]; }
	__device__ __forceinline__ int kvhead() const { return place[1]; }
	__device__ __forceinline__ int tile() const { return place[2]; }
	__device__ __forceinline__ int end() const { return (kvhead() + 1) * p.group; } // of the heads of the group
	__device__ __forceinline__ int tiles() const { return D > 64 ? (p.seq + TILE - 1) / TILE : place[3]; } // with 64, in no register either

	// fetch starts to copy a tile's queries, gradients of y and their statistics. Those beyond
	// the sequence are 0: nothing comes of them.
	__device__ __forceinline__ void fetch(int stage, int head, int at) const {
		T *q = queries + stage * (2 * S::SIZE), *dy = q + S::SIZE;
		const i64 row = (i64)batch() * p.seq, ldy = (i64)p.heads * D;
		const int t = thread(), query = at * TILE + t % TILE;
		copy_async<4>(stats + stage * (2 * TILE) + t, (t < TILE ? b.lse : b.delta) + ((i64)batch() * p.heads + head) * p.seq + query, query < p.seq);
		S::template fill<BACKWARD_THREADS>(q, b.q + row * b.ldq + (i64)head * D, b.ldq, at * TILE, p.seq);
		S::template fill<BACKWARD_THREADS>(dy, b.dy + row * ldy + (i64)head * D, ldy, at * TILE, p.seq);
	}

	// step goes to the next tile of queries, of the next head after the last; fetch_next fetches
	// it, where there is one.
	__device__ __forceinline__ void step(int &head, int &at) const {
		if (++at == tiles()) at = p.causal ? tile() : 0, head++;
	}
	__device__ __forceinline__ void fetch_next(int stage, int head, int at) const {
		step(head, at);
		if (head < end()) fetch(stage, head, at);
		commit_copies();
	}

	// across adds the product of the warp's rows of one tile and all rows of another,
	// transposed.
	static __device__ __forceinline__ void across(float (&sum)[8][4], const T *rows, const T *columns) {
#pragma unroll
		for (int d = 0; d < D; d += 16) {
			u32 x[4], y[4];
			left<S::LD>(x, rows, 16 * (threadIdx.x / 32), d);
#pragma unroll
			for (int j = 0; j < 4; j++) {
				right<S::LD>(y, columns, 16 * j, d);
				mma(sum[2 * j], x, y, T()), mma(sum[2 * j + 1], x, y + 2, T());
			}
		}
	}

	// keys adds a tile of queries to dk and dv of the warp's keys: by their probabilities and
	// the gradients of their scores (without the scale), which also go to shared memory.
	__device__ __forceinline__ void keys(float (&dk)[NS][4], float (&dv)[NS][4], int stage, int at) const {
		const T *q = queries + stage * (2 * S::SIZE), *dy = q + S::SIZE;
		const float *stat = stats + stage * (2 * TILE);
		const int t = thread(), lane = t % 32, m = 16 * (t / 32) + lane / 4, n = 2 * (lane % 4);
		float s[8][4], dp[8][4];
		u32 w[16];
		clear(s);
		across(s, ks, q);
		const float scale = p.scale * LOG2E;
		if ((tile() + 1) * TILE > p.seq || (p.causal && at == tile())) // some keys are not there, or later than queries
#pragma unroll
			for (int h = 0; h < 2; h++) {
				const int key = tile() * TILE + m + 8 * h, first = key >= p.seq ? TILE : p.causal ? key - at * TILE - n : 0;
#pragma unroll
				for (int j = 0; j < 8; j++)
#pragma unroll
					for (int i = 0; i < 2; i++)
						if (8 * j + i < first) s[j][2 * h + i] = NEG_INF;
			}
#pragma unroll
		for (int j = 0; j < 8; j++) {
			const Words<2> lse = Words<2>::at(stat + 8 * j + n);
#pragma unroll
			for (int i = 0; i < 4; i++) s[j][i] = exp2_(fma_(s[j][i], scale, -(of_bits(lse.w[i % 2]) * LOG2E)));
#pragma unroll
			for (int h = 0; h < 2; h++) w[2 * j + h] = two(s[j][2 * h], s[j][2 * h + 1], T());
		}
		__syncwarp();
		add(dv, w, dy);
		__syncwarp();
		clear(dp);
		across(dp, vs, dy);
		T *to = ds + m * LP + n;
#pragma unroll
		for (int j = 0; j < 8; j++) {
			const Words<2> delta = Words<2>::at(stat + TILE + 8 * j + n);
#pragma unroll
			for (int i = 0; i < 4; i++) dp[j][i] = s[j][i] * (dp[j][i] - of_bits(delta.w[i % 2]));
#pragma unroll
			for (int h = 0; h < 2; h++) {
				w[2 * j + h] = two(dp[j][2 * h], dp[j][2 * h + 1], T());
				*(u32 *)(to + 8 * h * LP + 8 * j) = w[2 * j + h];
			}
		}
		__syncwarp();
		add(dk, w, q);
	}

	// add adds the product of the warp's keys by queries, in registers, and those queries'
	// rows of values.
	static __device__ __forceinline__ void add(float (&sum)[NS][4], const u32 (&keys)[16], const T *values) {
#pragma unroll
		for (int k = 0; k < 2; k++)
#pragma unroll
			for (int j = 0; j < NS; j++) {
				if (j % 4 == 0) __syncwarp();
				u32 y[4];
				right_of_rows<S::LD>(y, values, 32 * k, 8 * j);
				mma(sum[j], keys + 8 * k, y, T()), mma(sum[j], keys + 8 * k + 4, y + 2, T());
			}
	}

	// add_dq adds dS·k to the tile's sum, in its turn, and writes dq if it is the last
	// to. A warp has 16 queries.
	__device__ __forceinline__ void add_dq(int head, int at) const {
		const int t = thread(), lane = t % 32, m = 16 * (t / 32);
		const i64 which = ((i64)batch() * p.heads + head) * tiles() + at;
		u32 *turn = b.counters + 1 + which;
		const bool last = tile() == (p.causal ? at : tiles() - 1);
		enum { PART = D > 96 ? NS / 2 : NS }; // of a row at a time: more do not fit the registers
#pragma unroll
		for (int part = 0; part < NS; part += PART) {
			float dq[PART][4];
			clear(dq);
#pragma unroll
			for (int k = 0; k < TILE; k += 32) {
				u32 x[8], y[4];
				left_of_columns<LP>(x, ds, m, k), left_of_columns<LP>(x + 4, ds, m, k + 16);
#pragma unroll
				for (int j = 0; j < PART; j++) {
					right_of_rows<S::LD>(y, ks, k, 8 * (part + j));
					mma(dq[j], x, y, T()), mma(dq[j], x + 4, y + 2, T());
				}
			}
			if (part == 0) wait_turn(turn, (u32)tile());
			float *sum = b.sums + which * (TILE * D) + part * (4 * BACKWARD_THREADS) + 4 * t;
			if (tile() > 0)
#pragma unroll
				for (int j = 0; j < PART; j++) {
					float old[4];
					get<4>(sum + j * (4 * BACKWARD_THREADS), old);
#pragma unroll
					for (int i = 0; i < 4; i++) dq[j][i] = old[i] + dq[j][i];
				}
			if (!last)
#pragma unroll
				for (int j = 0; j < PART; j++) put<4>(sum + j * (4 * BACKWARD_THREADS), dq[j]);
			else
#pragma unroll
				for (int h = 0; h < 2; h++) {
					const int query = at * TILE + m + lane / 4 + 8 * h;
					T *out = b.dq + ((i64)batch() * p.seq + query) * b.lddq + (i64)head * D + 8 * part + 2 * (lane % 4);
					if (query < p.seq)
#pragma unroll
						for (int j = 0; j < PART; j++) *(u32 *)(out + 8 * j) = two(dq[j][2 * h] * p.scale, dq[j][2 * h + 1] * p.scale, T());
				}
		}
		pass_turn(turn, (u32)tile());
		if (!last || tile() == 0) return;
		float *sum = b.sums + which * (TILE * D); // all have read it
#pragma unroll
		for (int line = 0; line < TILE * D; line += 32 * BACKWARD_THREADS)
			if (TILE * D % (32 * BACKWARD_THREADS) == 0 || line + 32 * t < TILE * D) discard(sum + line + 32 * t);
	}

	// finish writes a gradient of keys or values through the warp's rows of a tile of shared
	// memory.
	__device__ __forceinline__ void finish(T *to, T *through, const float (&sum)[NS][4], float factor) const {
		const int lane = threadIdx.x % 32, m = 16 * (threadIdx.x / 32);
		T *mine = through + m * S::LD, *at = mine + lane / 4 * S::LD + 2 * (lane % 4);
#pragma unroll
		for (int j = 0; j < NS; j++)
#pragma unroll
			for (int h = 0; h < 2; h++) *(u32 *)(at + 8 * h * S::LD + 8 * j) = two(sum[j][2 * h] * factor, sum[j][2 * h + 1] * factor, T());
		__syncwarp();
		S::drain(to + (i64)batch() * p.seq * b.lddkv + (i64)kvhead() * D, b.lddkv, tile() * TILE + m, p.seq, mine, 16, lane, 32);
	}
};

// backward: dq, dk and dv by five products. A block has a tile of keys and goes over
// the tiles of queries of its group of heads, of which STAGES are in shared memory.
template <class T, int D, int STAGES> DEVICE void backward(const Backward<T> &b, const Order &order, const Shape &p) {
	typedef Tile<T, D> S;
	typedef Work<T, D> W;
	DYNAMIC_SHARED(T, shared);
	SHARED(int, place, 4);
	if (threadIdx.x == 0) {
		const u32 kvheads = (u32)(p.heads / p.group), tiles = (u32)((p.seq + TILE - 1) / TILE);
		u32 tile;
		const u32 x = order.take(b.counters, kvheads * (u32)p.batch, tiles, &tile), batch = x / kvheads;
		place[0] = (int)batch, place[1] = (int)(x - batch * kvheads), place[2] = (int)tile, place[3] = (int)tiles;
	}
	__syncthreads();
	T *queries = shared + 2 * S::SIZE, *ds = queries + 2 * STAGES * S::SIZE;
	const W w = {b, p, shared, shared + S::SIZE, queries, ds, (float *)(ds + TILE * W::LP), place};
	{
		const i64 kv = (i64)w.batch() * p.seq * b.ldkv + (i64)w.kvhead() * D;
		S::template fill<BACKWARD_THREADS>(w.ks, b.k + kv, b.ldkv, w.tile() * TILE, p.seq);
		S::template fill<BACKWARD_THREADS>(w.vs, b.v + kv, b.ldkv, w.tile() * TILE, p.seq);
	}
	int head = w.kvhead() * p.group, at = p.causal ? w.tile() : 0, stage = 0;
	w.fetch(0, head, at);
	commit_copies();
	float dk[W::NS][4], dv[W::NS][4];
	clear(dk), clear(dv);
#pragma unroll 1
	while (head < w.end()) {
		wait_copies<0>();
		__syncthreads(); // the step's tiles are here, and nobody reads those of the step before
		if (STAGES == 2) w.fetch_next(1 - stage, head, at);
		w.keys(dk, dv, stage, at);
		__syncthreads(); // gradients of scores are here; nobody reads queries any more
		if (STAGES == 1) w.fetch_next(0, head, at);
		w.add_dq(head, at); // ends in a barrier
		w.step(head, at);
		if (STAGES == 2) stage = 1 - stage;
	}
	w.finish(b.dk, w.ks, dk, p.scale);
	w.finish(b.dv, w.vs, dv, 1);
}

#define SHAPE_PARAMETERS int batch, int seq, int heads, int group, float scale, int causal
#define SHAPE {batch, seq, heads, group, scale, causal}

// FLASH is the kernels for heads of D elements; BLOCKS of the backward shall be on a
// multiprocessor.
#define FLASH_OF(T, D, STAGES, BLOCKS) \
	DENSE(FORWARD_THREADS, 3, flash_forward_##T, const int *skip, const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, int at_once, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		forward<T, D>(q, k, v, ldq, ldkv, y, lse, at_once, p); \
	} \
	KERNEL(BACKWARD_THREADS, flash_delta_##T, const int *skip, const T *y, const T *dy, float *delta, u32 *counters, int counts, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		deltas<T, D>(y, dy, delta, counters, counts, p); \
	} \
	DENSE(BACKWARD_THREADS, BLOCKS, flash_backward_##T, const int *skip, const T *q, const T *k, const T *v, const T *dy, i64 ldq, i64 ldkv, const float *lse, const float *delta, \
		float *sums, u32 *counters, T *dq, T *dk, T *dv, i64 lddq, i64 lddkv, int spread, int stride, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		const Backward<T> b = {q, k, v, dy, ldq, ldkv, lse, delta, sums, counters, dq, dk, dv, lddq, lddkv}; \
		const Order order = {(u32)spread, (u32)stride}; \
		backward<T, D, STAGES>(b, order, p); \
	}

#define FLASH(D, STAGES, BLOCKS) \
	FLASH_OF(bf16, D, STAGES, BLOCKS) \
	FLASH_OF(f16, D, STAGES, BLOCKS)
