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
#define BACKWARD_THREADS 256
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
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
template <int HOW> DEVICE void ldmatrix(u32 *r, const void *row) {
	if (HOW == PLAIN)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// copy_async starts to copy 16 bytes to shared memory, or zeros.
DEVICE void copy_async(void *to, const void *from, bool there) {
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
DEVICE float exp2_(float x) {
	float y;
	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}
// two rounds two values to a word, the first in its low half.
DEVICE u32 two(float low, float high, bf16) {
	u32 w;
	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
	return w;
}
DEVICE u32 two(float low, float high, f16) {
	u32 w;
	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
	return w;
}
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
DEVICE void copy_async(void *to, const void *from, bool there) { shim::copy_async(to, from, there); }
DEVICE void commit_copies() { shim::commit_copies(); }
template <int LEFT> DEVICE void wait_copies() { shim::wait_copies(LEFT); }
DEVICE float exp2_(float x) { return exp2f(x); }
DEVICE u32 two(float low, float high, bf16) { return (u32)to_bf16(low) | (u32)to_bf16(high) << 16; }
DEVICE u32 two(float low, float high, f16) { return two_f16(low, high); }
#endif

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
		const int STEP = THREADS / LANES, c = threadIdx.x % LANES * 8;
		if (c >= D) return;
		int r = threadIdx.x / LANES;
		const T *p = from + (row + r) * ld + c;
		T *q = to + r * LD + c;
#pragma unroll
		for (int k = 0; k < TILE / STEP; k++, r += STEP, p += STEP * ld, q += STEP * LD) copy_async(q, row + r < rows ? p : from, row + r < rows);
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
		float y = __shfl_xor_sync(0xffffffffu, x, m);
		x = y > x ? y : x;
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
				for (int i = 2 * h; i < 2 * h + 2; i++) top = s[j][i] > top ? s[j][i] : top;
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
template <int N> DEVICE void hide(float (&s)[N][4], int query, int key, const Shape &p, float with) {
	const int t = threadIdx.x % 4;
#pragma unroll
	for (int j = 0; j < N; j++)
#pragma unroll
		for (int i = 0; i < 4; i++) {
			const int k = key + 8 * j + 2 * t + i % 2, q = query + 8 * (i / 2);
			if (k >= p.seq || (p.causal && k > q)) s[j][i] = with;
		}
}

// forward: q (rows ldq apart), k, v (ldkv) → y (heads·D), lse (batch, heads, seq). A
// block has a tile of queries of a head, a warp 16 of them.
template <class T, int D> DEVICE void forward(const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, const Shape &p) {
	typedef Tile<T, D> S;
	DYNAMIC_SHARED(T, qs);
	T *ks = qs + S::SIZE, *vs = ks + S::SIZE;
	const int tiles = (p.seq + TILE - 1) / TILE, x = blockIdx.x;
	const int head = x % p.heads, batch = x / p.heads % p.batch, tile = tiles - 1 - x / p.heads / p.batch; // the longest first
	const int q0 = tile * TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = q0 + 16 * warp + lane / 4;
	const i64 row = (i64)batch * p.seq;
	q += row * ldq + (i64)head * D;
	k += row * ldkv + (i64)(head / p.group) * D;
	v += row * ldkv + (i64)(head / p.group) * D;
	S::template fill<FORWARD_THREADS>(qs, q, ldq, q0, p.seq);
	S::template fill<FORWARD_THREADS>(ks, k, ldkv, 0, p.seq);
	commit_copies();

	float o[D / 8][4];
	clear(o);
	Softmax<D> soft = {{NEG_INF, NEG_INF}, {0, 0}};
	const float scale = p.scale * LOG2E;
	const int last = p.causal ? tile : tiles - 1;
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
			left<S::LD>(a, qs, 16 * warp, d);
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
		if (at == last) hide(s, query, at * TILE, p, NEG_INF);
		soft.next(s, o, scale);
#pragma unroll
		for (int j = 0; j < 8; j += 4) { // 32 keys
			const u32 a[8] = {two(s[j][0], s[j][1], T()), two(s[j][2], s[j][3], T()), two(s[j + 1][0], s[j + 1][1], T()), two(s[j + 1][2], s[j + 1][3], T()),
				two(s[j + 2][0], s[j + 2][1], T()), two(s[j + 2][2], s[j + 2][3], T()), two(s[j + 3][0], s[j + 3][1], T()), two(s[j + 3][2], s[j + 3][3], T())};
#pragma unroll
			for (int n = 0; n < D / 8; n++) {
				u32 b[4];
				right_of_rows<S::LD>(b, vs, 8 * j, 8 * n);
				mma(o[n], a, b, T()), mma(o[n], a + 4, b + 2, T());
			}
		}
	}
	T *mine = qs + 16 * warp * S::LD; // the warp's queries, which it needs no more
	__syncwarp();
#pragma unroll
	for (int h = 0; h < 2; h++) {
		const float sum = row_sum(soft.sum[h]), factor = 1 / sum;
		if (lane % 4 == 0 && query + 8 * h < p.seq) lse[((i64)batch * p.heads + head) * p.seq + query + 8 * h] = fma_(soft.most[h], p.scale, logf(sum));
#pragma unroll
		for (int n = 0; n < D / 8; n++)
			*(u32 *)(mine + (lane / 4 + 8 * h) * S::LD + 8 * n + 2 * (lane % 4)) = two(o[n][2 * h] * factor, o[n][2 * h + 1] * factor, T());
	}
	__syncwarp();
	const i64 ldy = (i64)p.heads * D;
	S::drain(y + row * ldy + (i64)head * D, ldy, q0 + 16 * warp, p.seq, mine, 16, lane, 32);
}

// delta (batch, heads, seq) = Σ dy·y of every query: 16 lanes each. It also sets the
// backward's counters to 0.
template <class T, int D> DEVICE void deltas(const T *y, const T *dy, float *delta, u32 *counters, int counts, const Shape &p) {
	for (i64 i = first(); i < counts; i += stride()) counters[i] = 0;
	const i64 i = ((i64)blockIdx.x * BACKWARD_THREADS + threadIdx.x) / 16, n = (i64)p.batch * p.seq * p.heads; // in memory's order
	const int c = threadIdx.x % 16 * 8;
	float sum = 0;
	if (i < n && c < D) {
		float a[8], b[8];
		get<8>(y + i * D + c, a), get<8>(dy + i * D + c, b);
#pragma unroll
		for (int j = 0; j < 8; j++) sum = fma_(a[j], b[j], sum);
	}
#pragma unroll
	for (int m = 8; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
	if (i >= n || c != 0) return;
	const u32 row = (u32)(i / p.heads), head = (u32)(i - (i64)row * p.heads);
	delta[((i64)(row / p.seq) * p.heads + head) * p.seq + row % p.seq] = sum;
}

// Turns are whose turn it is to add to a tile of dq: those of keys, in order. wait
// returns when turn n has come; pass ends it. Blocks take their work by tickets, first
// the first tiles of keys, so that who is waited for runs already.
DEVICE void wait_turn(u32 *turn, u32 n) {
#ifdef SHIM
	if (*turn != n) shim::stop(shim::DEADLOCK, "a block waits for a turn that blocks before it did not pass");
#else
	if (threadIdx.x == 0) {
		while (atomicAdd(turn, 0u) != n) {}
		__threadfence();
	}
#endif
	__syncthreads();
}
DEVICE void pass_turn(u32 *turn, u32 n) {
	__syncthreads();
	if (threadIdx.x == 0) {
		__threadfence();
		atomicExch(turn, n + 1);
	}
}

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

// Work is a tile of keys, with the tiles of queries that see it.
template <class T, int D, int STAGES> struct Work {
	typedef Tile<T, D> S;
	enum { NS = D / 16, LP = TILE + 8 }; // 8-column pieces of a warp's half of a row, row of a tile of scores

	const Backward<T> &b;
	const Shape &p;
	T *ks, *vs, *qs, *dys, *ps, *ds;
	int tiles, batch, kvhead, tile, first, count;

	__device__ __forceinline__ int head(int step) const { return kvhead * p.group + step / count; }
	__device__ __forceinline__ int queries(int step) const { return first + step % count; }

	// fetch starts to copy a step's queries and gradients of y.
	__device__ __forceinline__ void fetch(int step) const {
		const i64 row = (i64)batch * p.seq, ldy = (i64)p.heads * D;
		const int stage = STAGES == 1 ? 0 : step % STAGES;
		S::template fill<BACKWARD_THREADS>(qs + stage * S::SIZE, b.q + row * b.ldq + (i64)head(step) * D, b.ldq, queries(step) * TILE, p.seq);
		S::template fill<BACKWARD_THREADS>(dys + stage * S::SIZE, b.dy + row * ldy + (i64)head(step) * D, ldy, queries(step) * TILE, p.seq);
	}

	// across adds the product of 16 rows of one tile and 32 rows of another, transposed.
	static __device__ __forceinline__ void across(float (&sum)[4][4], const T *rows, const T *columns, int m, int n) {
#pragma unroll
		for (int d = 0; d < D; d += 16) {
			u32 x[4], y[4];
			left<S::LD>(x, rows, m, d);
#pragma unroll
			for (int j = 0; j < 2; j++) {
				right<S::LD>(y, columns, n + 16 * j, d);
				mma(sum[2 * j], x, y, T()), mma(sum[2 * j + 1], x, y + 2, T());
			}
		}
	}

	// scores makes the tile's probabilities and the gradients of its scores (without
	// the scale), in shared memory. A warp has 16 queries by 32 keys.
	__device__ __forceinline__ void scores(const T *q, const T *dy, int step) const {
		const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * (warp % 4), n = 32 * (warp / 4);
		float s[4][4], dp[4][4];
		clear(s), clear(dp);
		across(s, q, ks, m, n);
		across(dp, dy, vs, m, n);
		const int query = queries(step) * TILE + m + lane / 4, key = tile * TILE + n;
		const i64 stat = ((i64)batch * p.heads + head(step)) * p.seq;
		const float scale = p.scale * LOG2E;
		float l[2], d[2];
#pragma unroll
		for (int h = 0; h < 2; h++) {
			const bool there = query + 8 * h < p.seq;
			l[h] = there ? b.lse[stat + query + 8 * h] * LOG2E : -NEG_INF;
			d[h] = there ? b.delta[stat + query + 8 * h] : 0;
		}
#pragma unroll
		for (int j = 0; j < 4; j++)
#pragma unroll
			for (int i = 0; i < 4; i++) s[j][i] = exp2_(fma_(s[j][i], scale, -l[i / 2]));
		if (key + 32 > p.seq || (p.causal && queries(step) == tile)) hide(s, query, key, p, 0);
#pragma unroll
		for (int j = 0; j < 4; j++)
#pragma unroll
			for (int h = 0; h < 2; h++) {
				const int at = (m + lane / 4 + 8 * h) * LP + n + 8 * j + 2 * (lane % 4);
				const float *w = s[j] + 2 * h, *g = dp[j] + 2 * h;
				*(u32 *)(ps + at) = two(w[0], w[1], T());
				*(u32 *)(ds + at) = two(w[0] * (g[0] - d[h]), w[1] * (g[1] - d[h]), T());
			}
	}

	// add_rows adds the product of a tile of scores, transposed, and 32 rows of values.
	static __device__ __forceinline__ void add_rows(float (&sum)[NS][4], const T *scores, const T *values, int m, int n, int k) {
		u32 x[8], y[4];
		left_of_columns<LP>(x, scores, m, k), left_of_columns<LP>(x + 4, scores, m, k + 16);
#pragma unroll
		for (int j = 0; j < NS; j++) {
			right_of_rows<S::LD>(y, values, k, n + 8 * j);
			mma(sum[j], x, y, T()), mma(sum[j], x + 4, y + 2, T());
		}
	}

	// add adds Pᵀ·dy to dv and dSᵀ·q to dk. A warp has 16 keys by half a row.
	__device__ __forceinline__ void add(const T *q, const T *dy, float (&dk)[NS][4], float (&dv)[NS][4]) const {
		const int warp = threadIdx.x / 32, m = 16 * (warp % 4), n = D / 2 * (warp / 4);
#pragma unroll
		for (int k = 0; k < TILE; k += 32) {
			add_rows(dv, ps, dy, m, n, k);
			add_rows(dk, ds, q, m, n, k);
		}
	}

	// add_dq adds dS·k to the tile's sum, in its turn, and writes dq if it is the last
	// to. A warp has 16 queries by half a row.
	__device__ __forceinline__ void add_dq(int step) const {
		const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * (warp % 4), n = D / 2 * (warp / 4);
		float dq[NS][4];
		clear(dq);
#pragma unroll
		for (int k = 0; k < TILE; k += 32) {
			u32 x[8], y[4];
			left<LP>(x, ds, m, k), left<LP>(x + 4, ds, m, k + 16);
#pragma unroll
			for (int j = 0; j < NS; j++) {
				right_of_rows<S::LD>(y, ks, k, n + 8 * j);
				mma(dq[j], x, y, T()), mma(dq[j], x + 4, y + 2, T());
			}
		}
		const int at = queries(step);
		const i64 which = ((i64)batch * p.heads + head(step)) * tiles + at;
		u32 *turn = b.counters + 1 + which;
		float *sum = b.sums + which * (TILE * D) + 4 * threadIdx.x;
		const bool last = tile == (p.causal ? at : tiles - 1);
		wait_turn(turn, (u32)tile);
		T *out = b.dq + (i64)batch * p.seq * b.lddq + (i64)head(step) * D + n + 2 * (lane % 4);
#pragma unroll
		for (int j = 0; j < NS; j++) {
			if (tile > 0) {
				float old[4];
				get<4>(sum + j * (4 * BACKWARD_THREADS), old);
#pragma unroll
				for (int i = 0; i < 4; i++) dq[j][i] = old[i] + dq[j][i];
			}
			if (!last) {
				put<4>(sum + j * (4 * BACKWARD_THREADS), dq[j]);
				continue;
			}
#pragma unroll
			for (int h = 0; h < 2; h++) {
				const int query = at * TILE + m + lane / 4 + 8 * h;
				if (query < p.seq) *(u32 *)(out + query * b.lddq + 8 * j) = two(dq[j][2 * h] * p.scale, dq[j][2 * h + 1] * p.scale, T());
			}
		}
		pass_turn(turn, (u32)tile);
	}

	// finish writes a gradient of keys or values through a tile of shared memory.
	__device__ __forceinline__ void finish(T *to, T *through, const float (&sum)[NS][4], float factor) const {
		const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = 16 * (warp % 4) + lane / 4, n = D / 2 * (warp / 4) + 2 * (lane % 4);
#pragma unroll
		for (int j = 0; j < NS; j++)
#pragma unroll
			for (int h = 0; h < 2; h++) *(u32 *)(through + (m + 8 * h) * S::LD + n + 8 * j) = two(sum[j][2 * h] * factor, sum[j][2 * h + 1] * factor, T());
		__syncthreads();
		S::drain(to + (i64)batch * p.seq * b.lddkv + (i64)kvhead * D, b.lddkv, tile * TILE, p.seq, through, TILE, threadIdx.x, BACKWARD_THREADS);
	}
};

// backward: dq, dk and dv by five products. A block has a tile of keys and goes over
// the tiles of queries of its group of heads.
template <class T, int D, int STAGES> DEVICE void backward(const Backward<T> &b, const Shape &p) {
	typedef Tile<T, D> S;
	typedef Work<T, D, STAGES> W;
	DYNAMIC_SHARED(T, shared);
	SHARED(u32, ticket, 1);
	if (threadIdx.x == 0) *ticket = atomicAdd(b.counters, 1u);
	__syncthreads();
	const int kvheads = p.heads / p.group, x = (int)*ticket, tiles = (p.seq + TILE - 1) / TILE, tile = x / kvheads / p.batch;
	T *qs = shared + 2 * S::SIZE, *dys = qs + STAGES * S::SIZE, *ps = dys + STAGES * S::SIZE;
	const W w = {b, p, shared, shared + S::SIZE, qs, dys, ps, ps + TILE * W::LP,
		tiles, x / kvheads % p.batch, x % kvheads, tile, p.causal ? tile : 0, p.causal ? tiles - tile : tiles};
	const i64 kv = (i64)w.batch * p.seq * b.ldkv + (i64)w.kvhead * D;
	S::template fill<BACKWARD_THREADS>(w.ks, b.k + kv, b.ldkv, tile * TILE, p.seq);
	S::template fill<BACKWARD_THREADS>(w.vs, b.v + kv, b.ldkv, tile * TILE, p.seq);
	w.fetch(0);
	commit_copies();
	float dk[W::NS][4], dv[W::NS][4];
	clear(dk), clear(dv);
	const int steps = p.group * w.count;
	for (int step = 0; step < steps; step++) {
		if (STAGES == 2) {
			if (step + 1 < steps) w.fetch(step + 1);
			commit_copies();
		}
		wait_copies<STAGES - 1>();
		__syncthreads();
		const int stage = STAGES == 1 ? 0 : step % STAGES;
		const T *q = w.qs + stage * S::SIZE, *dy = w.dys + stage * S::SIZE;
		w.scores(q, dy, step);
		__syncthreads();
		w.add(q, dy, dk, dv);
		w.add_dq(step); // ends in a barrier: the step's tiles are free
		if (STAGES == 1 && step + 1 < steps) {
			w.fetch(step + 1);
			commit_copies();
		}
	}
	w.finish(b.dk, w.ks, dk, p.scale);
	w.finish(b.dv, w.vs, dv, 1);
}

#define SHAPE_PARAMETERS int batch, int seq, int heads, int group, float scale, int causal
#define SHAPE {batch, seq, heads, group, scale, causal}

// DENSE is KERNEL with the blocks that a multiprocessor shall hold, which bounds the
// registers of a thread.
#ifndef SHIM
#define DENSE(threads, blocks, name, ...) extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
#else
#define DENSE(threads, blocks, name, ...) KERNEL(threads, name, __VA_ARGS__)
#endif

#define FLASH_OF(T, D, STAGES) \
	DENSE(FORWARD_THREADS, 3, flash_forward_##T, const int *skip, const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		forward<T, D>(q, k, v, ldq, ldkv, y, lse, p); \
	} \
	KERNEL(BACKWARD_THREADS, flash_delta_##T, const int *skip, const T *y, const T *dy, float *delta, u32 *counters, int counts, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		deltas<T, D>(y, dy, delta, counters, counts, p); \
	} \
	DENSE(BACKWARD_THREADS, 2, flash_backward_##T, const int *skip, const T *q, const T *k, const T *v, const T *dy, i64 ldq, i64 ldkv, const float *lse, const float *delta, \
		float *sums, u32 *counters, T *dq, T *dk, T *dv, i64 lddq, i64 lddkv, SHAPE_PARAMETERS) { \
		SKIP(); \
		const Shape p = SHAPE; \
		const Backward<T> b = {q, k, v, dy, ldq, ldkv, lse, delta, sums, counters, dq, dk, dv, lddq, lddkv}; \
		backward<T, D, STAGES>(b, p); \
	}

#define FLASH(D, STAGES) \
	FLASH_OF(bf16, D, STAGES) \
	FLASH_OF(f16, D, STAGES)
