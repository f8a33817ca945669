// Attention that never holds the matrix of scores: see bind_attention.go.
//
// A block of 16 × 16 threads works on a tile of queries by a tile of keys, whose
// rows it holds in shared memory in fp32. Thread (ty, tx) has the scores of rows
// ty·R … ty·R+R−1 and of columns tx, tx+16, …; of sums over a tile's rows, such as
// P·V, it has the same rows and runs of consecutive columns. Softmax runs along
// (Milakov and Gimelshein 2018; Dao et al. 2022): a row keeps its largest score
// and its sum so far, and what was summed is rescaled as a larger one comes.
//
// The backward is two kernels: one has a tile of queries and goes over keys for
// dq, the other a tile of keys and goes over the queries of its group of heads
// for dk and dv. Nobody adds into what another writes, so all sums have one order.
//
// A causal mask leaves products out; it does not multiply by zero, which an
// infinity would turn into NaN.

#define SIDE 16
#define TILE_THREADS (SIDE * SIDE)
#define NEG_INF of_bits(0xff800000u)

struct __align__(16) V4 { float v[4]; };
struct __align__(8) V2 { float v[2]; };

// Runs of consecutive floats in shared memory.
template <int N> struct Run;
template <> struct Run<1> {
	static __device__ __forceinline__ void get(const float *p, float *v) { v[0] = p[0]; }
	static __device__ __forceinline__ void put(float *p, const float *v) { p[0] = v[0]; }
};
template <> struct Run<2> {
	static __device__ __forceinline__ void get(const float *p, float *v) {
		ALIGNED(p, 8);
		V2 r = *(const V2 *)p;
		v[0] = r.v[0], v[1] = r.v[1];
	}
	static __device__ __forceinline__ void put(float *p, const float *v) {
		ALIGNED(p, 8);
		V2 r;
		r.v[0] = v[0], r.v[1] = v[1];
		*(V2 *)p = r;
	}
};
template <> struct Run<4> {
	static __device__ __forceinline__ void get(const float *p, float *v) {
		ALIGNED(p, 16);
		V4 r = *(const V4 *)p;
		v[0] = r.v[0], v[1] = r.v[1], v[2] = r.v[2], v[3] = r.v[3];
	}
	static __device__ __forceinline__ void put(float *p, const float *v) {
		ALIGNED(p, 16);
		V4 r;
		r.v[0] = v[0], r.v[1] = v[1], r.v[2] = v[2], r.v[3] = v[3];
		*(V4 *)p = r;
	}
};

// quad reads four consecutive elements of memory in one access, put_quad writes.
DEVICE void quad(const float *p, float *v) { Run<4>::get(p, v); }
DEVICE void quad(const bf16 *p, float *v) {
	ALIGNED(p, 8);
	uint2 h = *(const uint2 *)p;
	v[0] = of_bits(h.x << 16), v[1] = of_bits(h.x & 0xffff0000u);
	v[2] = of_bits(h.y << 16), v[3] = of_bits(h.y & 0xffff0000u);
}
DEVICE void quad(const f16 *p, float *v) {
	ALIGNED(p, 8);
	uint2 h = *(const uint2 *)p;
	v[0] = f16_at(h.x), v[1] = f16_at(h.x >> 16);
	v[2] = f16_at(h.y), v[3] = f16_at(h.y >> 16);
}
DEVICE void put_quad(float *p, const float *v) { Run<4>::put(p, v); }
DEVICE void put_quad(bf16 *p, const float *v) {
	ALIGNED(p, 8);
	uint2 h;
	h.x = two_bf16(v[0], v[1]);
	h.y = two_bf16(v[2], v[3]);
	*(uint2 *)p = h;
}

DEVICE void put_quad(f16 *p, const float *v) {
	ALIGNED(p, 8);
	uint2 h = {two_f16(v[0], v[1]), two_f16(v[2], v[3])};
	*(uint2 *)p = h;
}

// Shape of an attention. Elements of a head lie next to each other; wide says
// that all rows of all operands begin at multiples of four elements of memory.
struct Shape {
	int batch, seq, heads, group, dim; // group: heads that share keys and values
	float scale;
	int causal, wide;
};

// Place of a block: the largest pieces of work come first.
struct Place { int batch, head, tile; };

DEVICE Place place_of(int heads, int batch, int tiles, bool descending) {
	const u32 x = blockIdx.x, rest = x / (u32)heads, tile = rest / (u32)batch;
	Place p;
	p.head = (int)(x - rest * (u32)heads);
	p.batch = (int)(rest - tile * (u32)batch);
	p.tile = (int)tile;
	if (descending) p.tile = tiles - 1 - p.tile;
	return p;
}

// stage copies rows [row, row + ROWS) of a head into shared memory; what is
// beyond the sequence or the head's width becomes 0.
template <int ROWS, int DM, class T> DEVICE void stage(float *to, const T *from, i64 ld, int row, const Shape &s) {
	for (int i = threadIdx.x; i < ROWS * (DM / 4); i += TILE_THREADS) {
		int r = i / (DM / 4), c = i % (DM / 4) * 4;
		float v[4] = {0, 0, 0, 0};
		if (row + r < s.seq && c < s.dim) {
			const T *p = from + (row + r) * ld + c;
			if (s.wide) quad(p, v);
			else
				for (int k = 0; k < 4; k++)
					if (c + k < s.dim) v[k] = load(p + k);
		}
		Run<4>::put(to + r * (DM + 4) + c, v);
	}
}

// scores adds to acc[i][j] the product of row ty·R+i of a and row tx+16j of b.
template <int R, int C, int DM> DEVICE void scores(const float *a, const float *b, float (&acc)[R][C]) {
	int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
#pragma unroll 4
	for (int d = 0; d < DM; d += 4) {
		float x[R][4], y[C][4];
#pragma unroll
		for (int i = 0; i < R; i++) Run<4>::get(a + (ty * R + i) * (DM + 4) + d, x[i]);
#pragma unroll
		for (int j = 0; j < C; j++) Run<4>::get(b + (tx + SIDE * j) * (DM + 4) + d, y[j]);
#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int j = 0; j < C; j++)
#pragma unroll
				for (int k = 0; k < 4; k++) acc[i][j] = fma_(x[i][k], y[j][k], acc[i][j]);
	}
}

// Which of the products of a tile there are.
enum { ALL, ROWS_SEE_PAST, ROWS_SEEN_LATER };

// Sum of a row: the columns of a head that a thread has.
template <int DM> struct Columns {
	static const int N = DM / SIDE, RUN = N < 4 ? N : 4, RUNS = N / RUN;
	static __device__ __forceinline__ int at(int run) { return threadIdx.x % SIDE * RUN + SIDE * RUN * run; }
};

// combine adds to acc[i] the sum over k of w[k][ty·R+i] times row k of m; rows
// are row0 on, and k stands for k0 on, where the mask asks.
template <int R, int K, int DM, int MASK> DEVICE void combine(const float *w, const float *m, float (&acc)[R][DM / SIDE], int row0, int k0) {
	typedef Columns<DM> C;
	int ty = threadIdx.x / SIDE;
#pragma unroll 4
	for (int k = 0; k < K; k++) {
		float x[R], y[C::N];
		Run<R>::get(w + k * (R * SIDE + 4) + ty * R, x);
#pragma unroll
		for (int c = 0; c < C::RUNS; c++) Run<C::RUN>::get(m + k * (DM + 4) + C::at(c), y + c * C::RUN);
#pragma unroll
		for (int i = 0; i < R; i++) {
			int row = row0 + ty * R + i;
			if (MASK == ROWS_SEE_PAST && k0 + k > row || MASK == ROWS_SEEN_LATER && k0 + k < row) continue;
#pragma unroll
			for (int c = 0; c < C::N; c++) acc[i][c] = fma_(x[i], y[c], acc[i][c]);
		}
	}
}

// unstage writes the rows of a head that a block has, each times its factor.
template <int R, int DM, class T> DEVICE void unstage(T *to, i64 ld, int row0, const float (&acc)[R][DM / SIDE], const float *factor, const Shape &s) {
	typedef Columns<DM> C;
	int ty = threadIdx.x / SIDE;
#pragma unroll
	for (int i = 0; i < R; i++) {
		int row = row0 + ty * R + i;
		if (row >= s.seq) continue;
#pragma unroll
		for (int c = 0; c < C::RUNS; c++) {
			float v[4] = {0, 0, 0, 0};
#pragma unroll
			for (int k = 0; k < C::RUN; k++) v[k] = acc[i][c * C::RUN + k] * factor[i];
			T *p = to + row * ld + C::at(c);
			if (C::RUN == 4 && s.wide && C::at(c) < s.dim) {
				put_quad(p, v);
				continue;
			}
#pragma unroll
			for (int k = 0; k < C::RUN; k++)
				if (C::at(c) + k < s.dim) narrow(p + k, v[k]);
		}
	}
}

// across reduces over the 16 threads that share rows.
DEVICE float across_max(float x) {
	for (int m = SIDE / 2; m > 0; m >>= 1) {
		float y = __shfl_xor_sync(0xffffffffu, x, m);
		x = y > x ? y : x;
	}
	return x;
}

DEVICE float across_sum(float x) {
	for (int m = SIDE / 2; m > 0; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
	return x;
}

template <int R, int C> DEVICE void clear(float (&a)[R][C]) {
#pragma unroll
	for (int i = 0; i < R; i++)
#pragma unroll
		for (int j = 0; j < C; j++) a[i][j] = 0;
}

// forward: q (rows ldq apart), k, v (ldkv) → y (heads·dim), lse (batch, heads, seq).
template <class T, int DM, int BQ, int BK> DEVICE void forward(const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, Shape s) {
	const int R = BQ / SIDE, C = BK / SIDE;
	DYNAMIC_SHARED(float, shared);
	float *qs = shared, *kv = qs + BQ * (DM + 4), *ps = kv + BK * (DM + 4);
	int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
	Place at = place_of(s.heads, s.batch, (s.seq + BQ - 1) / BQ, true);
	int q0 = at.tile * BQ;
	i64 row = (i64)at.batch * s.seq;
	q += row * ldq + (i64)at.head * s.dim;
	k += row * ldkv + (i64)(at.head / s.group) * s.dim;
	v += row * ldkv + (i64)(at.head / s.group) * s.dim;
	stage<BQ, DM>(qs, q, ldq, q0, s);

	float most[R], sum[R], acc[R][DM / SIDE];
	clear(acc);
#pragma unroll
	for (int i = 0; i < R; i++) most[i] = NEG_INF, sum[i] = 0;
	int keys = s.causal && q0 + BQ < s.seq ? q0 + BQ : s.seq;
	for (int k0 = 0; k0 < keys; k0 += BK) {
		__syncthreads();
		stage<BK, DM>(kv, k, ldkv, k0, s);
		__syncthreads();
		float p[R][C];
		clear(p);
		scores<R, C, DM>(qs, kv, p);
		__syncthreads();
		stage<BK, DM>(kv, v, ldkv, k0, s);
		bool masked = s.causal && k0 + BK - 1 > q0;
#pragma unroll
		for (int i = 0; i < R; i++) {
			int query = q0 + ty * R + i;
			float next = most[i];
#pragma unroll
			for (int j = 0; j < C; j++) {
				int key = k0 + tx + SIDE * j;
				p[i][j] = key >= s.seq || masked && key > query ? NEG_INF : p[i][j] * s.scale;
				next = p[i][j] > next ? p[i][j] : next;
			}
			next = across_max(next);
			float c = next == NEG_INF ? 0 : next;
			float again = expf(most[i] - c), part = 0;
			most[i] = next;
#pragma unroll
			for (int j = 0; j < C; j++) {
				p[i][j] = expf(p[i][j] - c);
				part += p[i][j];
				ps[(tx + SIDE * j) * (BQ + 4) + ty * R + i] = p[i][j];
			}
			sum[i] = sum[i] * again + part;
#pragma unroll
			for (int d = 0; d < DM / SIDE; d++) acc[i][d] *= again;
		}
		__syncthreads();
		if (masked) combine<R, BK, DM, ROWS_SEE_PAST>(ps, kv, acc, q0, k0);
		else combine<R, BK, DM, ALL>(ps, kv, acc, q0, k0);
	}
	float factor[R];
#pragma unroll
	for (int i = 0; i < R; i++) {
		sum[i] = across_sum(sum[i]);
		factor[i] = 1 / sum[i];
		int query = q0 + ty * R + i;
		if (tx == 0 && query < s.seq) lse[((i64)at.batch * s.heads + at.head) * s.seq + query] = most[i] + logf(sum[i]);
	}
	i64 ldy = (i64)s.heads * s.dim;
	unstage<R, DM>(y + row * ldy + (i64)at.head * s.dim, ldy, q0, acc, factor, s);
}

// delta (batch, heads, seq) = Σ dy·y of every query: a warp each. There are fewer than 2^31.
template <class T> DEVICE void deltas(const T *y, const T *dy, float *delta, Shape s) {
	const u32 i = blockIdx.x * (TILE_THREADS / 32) + threadIdx.x / 32, row = i / (u32)s.seq, batch = row / (u32)s.heads;
	if (batch >= (u32)s.batch) return;
	const u32 query = i - row * (u32)s.seq, head = row - batch * (u32)s.heads;
	const i64 at = (((i64)batch * s.seq + query) * s.heads + head) * s.dim;
	float sum = 0;
	for (int d = threadIdx.x % 32; d < s.dim; d += 32) sum = fma_(load(dy + at + d), load(y + at + d), sum);
	sum = warp_sum(sum);
	if (threadIdx.x % 32 == 0) delta[i] = sum;
}

// backward_q: dq (rows lddq apart) of a tile of queries.
template <class T, int DM, int BQ, int BK> DEVICE void backward_q(const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, const T *dy, const float *lse, const float *delta, T *dq, i64 lddq, Shape s) {
	const int R = BQ / SIDE, C = BK / SIDE;
	DYNAMIC_SHARED(float, shared);
	float *qs = shared, *dys = qs + BQ * (DM + 4), *ks = dys + BQ * (DM + 4), *vs = ks + BK * (DM + 4), *ws = vs + BK * (DM + 4);
	int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
	Place at = place_of(s.heads, s.batch, (s.seq + BQ - 1) / BQ, true);
	int q0 = at.tile * BQ;
	i64 row = (i64)at.batch * s.seq, ldy = (i64)s.heads * s.dim, stat = ((i64)at.batch * s.heads + at.head) * s.seq;
	q += row * ldq + (i64)at.head * s.dim;
	k += row * ldkv + (i64)(at.head / s.group) * s.dim;
	v += row * ldkv + (i64)(at.head / s.group) * s.dim;
	stage<BQ, DM>(qs, q, ldq, q0, s);
	stage<BQ, DM>(dys, dy + row * ldy + (i64)at.head * s.dim, ldy, q0, s);

	float l[R], d[R], acc[R][DM / SIDE], one[R];
	clear(acc);
#pragma unroll
	for (int i = 0; i < R; i++) {
		int query = q0 + ty * R + i;
		l[i] = query < s.seq ? lse[stat + query] : 0;
		d[i] = query < s.seq ? delta[stat + query] : 0;
		one[i] = 1;
	}
	int keys = s.causal && q0 + BQ < s.seq ? q0 + BQ : s.seq;
	for (int k0 = 0; k0 < keys; k0 += BK) {
		__syncthreads();
		stage<BK, DM>(ks, k, ldkv, k0, s);
		stage<BK, DM>(vs, v, ldkv, k0, s);
		__syncthreads();
		float p[R][C], dp[R][C];
		clear(p), clear(dp);
		scores<R, C, DM>(qs, ks, p);
		scores<R, C, DM>(dys, vs, dp);
		bool masked = s.causal && k0 + BK - 1 > q0;
#pragma unroll
		for (int i = 0; i < R; i++)
#pragma unroll
			for (int j = 0; j < C; j++) {
				int key = k0 + tx + SIDE * j, query = q0 + ty * R + i;
				float ds = expf(p[i][j] * s.scale - l[i]) * (dp[i][j] - d[i]) * s.scale;
				ws[(tx + SIDE * j) * (BQ + 4) + ty * R + i] = key >= s.seq || query >= s.seq || masked && key > query ? 0 : ds;
			}
		__syncthreads();
		if (masked) combine<R, BK, DM, ROWS_SEE_PAST>(ws, ks, acc, q0, k0);
		else combine<R, BK, DM, ALL>(ws, ks, acc, q0, k0);
	}
	unstage<R, DM>(dq + row * lddq + (i64)at.head * s.dim, lddq, q0, acc, one, s);
}

// backward_kv: dk and dv (rows lddkv apart) of a tile of keys, over the queries of
// all heads of their group.
template <class T, int DM, int BQ, int BK> DEVICE void backward_kv(const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, const T *dy, const float *lse, const float *delta, T *dk, T *dv, i64 lddkv, Shape s) {
	const int R = BK / SIDE, C = BQ / SIDE;
	DYNAMIC_SHARED(float, shared);
	float *qs = shared, *dys = qs + BQ * (DM + 4), *ks = dys + BQ * (DM + 4), *vs = ks + BK * (DM + 4), *ws = vs + BK * (DM + 4);
	int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
	int kvheads = s.heads / s.group;
	Place at = place_of(kvheads, s.batch, (s.seq + BK - 1) / BK, false);
	int k0 = at.tile * BK;
	i64 row = (i64)at.batch * s.seq, ldy = (i64)s.heads * s.dim;
	k += row * ldkv + (i64)at.head * s.dim;
	v += row * ldkv + (i64)at.head * s.dim;
	stage<BK, DM>(ks, k, ldkv, k0, s);
	stage<BK, DM>(vs, v, ldkv, k0, s);

	float accK[R][DM / SIDE], accV[R][DM / SIDE], one[R];
	clear(accK), clear(accV);
#pragma unroll
	for (int i = 0; i < R; i++) one[i] = 1;
	for (int g = 0; g < s.group; g++) {
		int head = at.head * s.group + g;
		const T *qh = q + row * ldq + (i64)head * s.dim, *dyh = dy + row * ldy + (i64)head * s.dim;
		i64 stat = ((i64)at.batch * s.heads + head) * s.seq;
		for (int q0 = s.causal ? k0 / BQ * BQ : 0; q0 < s.seq; q0 += BQ) {
			__syncthreads();
			stage<BQ, DM>(qs, qh, ldq, q0, s);
			stage<BQ, DM>(dys, dyh, ldy, q0, s);
			__syncthreads();
			float p[R][C], dp[R][C];
			clear(p), clear(dp);
			scores<R, C, DM>(ks, qs, p);
			scores<R, C, DM>(vs, dys, dp);
			bool masked = s.causal && q0 < k0 + BK - 1;
#pragma unroll
			for (int j = 0; j < C; j++) {
				int query = q0 + tx + SIDE * j;
				float l = query < s.seq ? lse[stat + query] : 0, d = query < s.seq ? delta[stat + query] : 0;
#pragma unroll
				for (int i = 0; i < R; i++) {
					int key = k0 + ty * R + i;
					bool there = query < s.seq && key < s.seq && !(masked && key > query);
					p[i][j] = there ? expf(p[i][j] * s.scale - l) : 0;
					dp[i][j] = there ? p[i][j] * (dp[i][j] - d) * s.scale : 0;
				}
				float run[R];
#pragma unroll
				for (int i = 0; i < R; i++) run[i] = p[i][j];
				Run<R>::put(ws + (tx + SIDE * j) * (BK + 4) + ty * R, run);
			}
			__syncthreads();
			if (masked) combine<R, BQ, DM, ROWS_SEEN_LATER>(ws, dys, accV, k0, q0);
			else combine<R, BQ, DM, ALL>(ws, dys, accV, k0, q0);
			__syncthreads();
#pragma unroll
			for (int j = 0; j < C; j++) {
				float run[R];
#pragma unroll
				for (int i = 0; i < R; i++) run[i] = dp[i][j];
				Run<R>::put(ws + (tx + SIDE * j) * (BK + 4) + ty * R, run);
			}
			__syncthreads();
			if (masked) combine<R, BQ, DM, ROWS_SEEN_LATER>(ws, qs, accK, k0, q0);
			else combine<R, BQ, DM, ALL>(ws, qs, accK, k0, q0);
		}
	}
	i64 out = row * lddkv + (i64)at.head * s.dim;
	unstage<R, DM>(dk + out, lddkv, k0, accK, one, s);
	unstage<R, DM>(dv + out, lddkv, k0, accV, one, s);
}

#define SHAPE_PARAMETERS int batch, int seq, int heads, int group, int dim, float scale, int causal, int wide
#define SHAPE {batch, seq, heads, group, dim, scale, causal, wide}

// Kernels for heads that are padded to DM elements; bind_attention.go has the same
// tiles. A source for each width keeps what one run compiles small.
#define ATTENTION_OF(name, T, DM, BQ, BK, GQ, GK) \
	DENSE(TILE_THREADS, 2, attention_##name, const int *skip, const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, T *y, float *lse, SHAPE_PARAMETERS) { \
		SKIP(); \
		Shape s = SHAPE; \
		forward<T, DM, BQ, BK>(q, k, v, ldq, ldkv, y, lse, s); \
	} \
	KERNEL(TILE_THREADS, attention_delta_##name, const int *skip, const T *y, const T *dy, float *delta, SHAPE_PARAMETERS) { \
		SKIP(); \
		Shape s = SHAPE; \
		deltas(y, dy, delta, s); \
	} \
	DENSE(TILE_THREADS, 2, attention_dq_##name, const int *skip, const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, const T *dy, const float *lse, const float *delta, T *dq, i64 lddq, SHAPE_PARAMETERS) { \
		SKIP(); \
		Shape s = SHAPE; \
		backward_q<T, DM, GQ, GK>(q, k, v, ldq, ldkv, dy, lse, delta, dq, lddq, s); \
	} \
	DENSE(TILE_THREADS, 2, attention_dkv_##name, const int *skip, const T *q, const T *k, const T *v, i64 ldq, i64 ldkv, const T *dy, const float *lse, const float *delta, T *dk, T *dv, i64 lddkv, SHAPE_PARAMETERS) { \
		SKIP(); \
		Shape s = SHAPE; \
		backward_kv<T, DM, GQ, GK>(q, k, v, ldq, ldkv, dy, lse, delta, dk, dv, lddkv, s); \
	}

#define ATTENTION(DM, BQ, BK, GQ, GK) \
	ATTENTION_OF(f32, float, DM, BQ, BK, GQ, GK) \
	ATTENTION_OF(bf16, bf16, DM, BQ, BK, GQ, GK) \
	ATTENTION_OF(f16, f16, DM, BQ, BK, GQ, GK)
