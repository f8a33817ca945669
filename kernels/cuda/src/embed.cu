// Embeddings, positions, rows, rotary positions.

// BY_ROWS is a block's share of rows, which are the grid's second dimension: so no
// thread divides to know its row and column.
#define BY_ROWS(n, rows) _Pragma("unroll 1") for (i64 n = blockIdx.y; n < (rows); n += gridDim.y)

// Embed: y (N,C) = rows of table (V,C). A wrong token is told and its row is 0.
template <class T> DEVICE void embed(const int *tokens, const T *table, T *y, i64 rows, i64 vocab, i64 cols, Report *report) {
	const int N = 16 / sizeof(T);
	const i64 packs = cols % N == 0 && wide(table, y) ? cols / N : 0;
	const Words<4> zero = {{0, 0, 0, 0}};
	BY_ROWS(n, rows) {
		const i64 t = tokens[n];
		const bool ok = t >= 0 && t < vocab;
		if (!ok && first() == 0) wrong(report, n, (int)t);
		const T *from = table + (ok ? t : 0) * cols;
		STRIDED(c, packs) (ok ? Words<4>::at(from + c * N) : zero).to(y + n * cols + c * N);
		if (packs) continue;
		STRIDED(c, cols) {
			if (ok) y[n * cols + c] = from[c];
			else narrow(y + n * cols + c, 0);
		}
	}
}

#define EMBED(T) \
	KERNEL(256, embed_##T, const int *skip, const int *tokens, const T *table, T *y, i64 rows, i64 vocab, i64 cols, Report *report) { \
		SKIP(); \
		embed(tokens, table, y, rows, vocab, cols, report); \
	}
FOR_FLOATS(EMBED)

// EmbedGrad: row v of dtable (V,C) is the sum of the rows of dy (N,C) whose token
// is v, in increasing order. A block owns ROWS rows of the table by 256 columns
// and looks at all tokens, so that nothing else writes them. Its threads are as many
// groups as 16 bytes of dy have columns: a thread has so many neighbouring columns, a
// group every so many-th row.
#define ROWS 16

// read_columns reads N columns of a row, zeros from left on: at once if packs.
template <int N, class T> DEVICE void read_columns(const T *p, i64 left, bool packs, float *v) {
	if (packs && left >= N) {
		get<N>(p, v);
		return;
	}
#pragma unroll
	for (int j = 0; j < N; j++) v[j] = j < left ? load(p + j) : 0.0f;
}

template <class T, class G> DEVICE void embed_grad(const int *tokens, const T *dy, G *dtable, i64 n, i64 vocab, i64 cols, int accumulate, Report *report) {
	const int N = Pack<T>::N, READS = 32 / N;
	SHARED(float, sum, ROWS * 256);
	SHARED(int, rows, 256); // of the tokens that are looked at: the row, in the block
	SHARED(u32, hits, 8 * N); // tokens of a group, 32 a word
	SHARED(u32, touched, N); // rows of a group
	const int t = threadIdx.x, group = t / (256 / N), lane = t % (256 / N);
	const i64 v0 = (i64)blockIdx.x * ROWS, col = (i64)blockIdx.y * 256 + N * lane, left = cols - col;
	const bool packs = cols % N == 0 && wide(dy, dtable);
	float v[N], s[N];
#pragma unroll 1
	for (int r = group; r < ROWS; r += N) {
		read_columns<N>(dtable + (v0 + r) * cols + col, accumulate && v0 + r < vocab ? left : 0, packs, v);
		put_shared<N>(sum + r * 256 + N * lane, v);
	}
	if (lane == 0) touched[group] = 0;
	int next = t < n ? tokens[t] : 0;
#pragma unroll 1
	for (i64 base = 0; base < n; base += 256) {
		const i64 token = base + t < n ? next : v0 - 1;
		if (base + 256 + t < n) next = tokens[base + 256 + t];
		if (base + t < n && (token < 0 || token >= vocab) && blockIdx.x == 0 && blockIdx.y == 0) wrong(report, base + t, (int)token);
		const bool mine = token >= v0 && token < v0 + ROWS && token < vocab;
		if (!__syncthreads_or(mine)) continue; // most looks find none of the block's rows
		if (mine) rows[t] = (int)(token - v0);
#pragma unroll
		for (int g = 0; g < N; g++) {
			const u32 hit = __ballot_sync(0xffffffffu, mine && (token - v0) % N == g);
			if (t % 32 == 0) hits[g * 8 + t / 32] = hit;
		}
		__syncthreads();
		// A word of a text may be every twentieth: READS of its rows are on their way before the
		// first is added.
		int w = 0, at[READS];
		u32 m = hits[group * 8];
		float ahead[READS][N];
#pragma unroll 1
		do {
#pragma unroll
			for (int k = 0; k < READS; k++) {
				while (m == 0 && w < 7) m = hits[group * 8 + ++w];
				at[k] = m == 0 ? -1 : w * 32 + __ffs((int)m) - 1;
				m &= m - 1;
				if (at[k] >= 0) read_columns<N>(dy + (base + at[k]) * cols + col, left, packs, ahead[k]);
			}
#pragma unroll
			for (int k = 0; k < READS; k++) {
				if (at[k] < 0) continue;
				const int r = rows[at[k]];
				float *to = sum + r * 256 + N * lane;
				get<N>(to, s);
#pragma unroll
				for (int j = 0; j < N; j++) s[j] += ahead[k][j];
				put_shared<N>(to, s);
				if (lane == 0) touched[group] |= 1u << r;
			}
		} while (at[READS - 1] >= 0);
		__syncthreads();
	}
	__syncthreads();
#pragma unroll 1
	for (int r = group; r < ROWS; r += N) {
		const bool changed = !accumulate || (touched[group] >> r & 1);
		if (!changed || v0 + r >= vocab || left <= 0) continue;
		G *p = dtable + (v0 + r) * cols + col;
		get<N>(sum + r * 256 + N * lane, s);
		if (packs) put<N>(p, s);
		else
#pragma unroll
			for (int j = 0; j < N; j++)
				if (j < left) narrow(p + j, s[j]);
	}
}

#define EMBED_GRAD(T, G) \
	KERNEL(256, embed_grad_##T##_##G, const int *skip, const int *tokens, const T *dy, G *dtable, i64 n, i64 vocab, i64 cols, int accumulate, Report *report) { \
		SKIP(); \
		embed_grad(tokens, dy, dtable, n, vocab, cols, accumulate, report); \
	}
FOR_PAIRS(EMBED_GRAD)

// AddPos: y[n] = x[n] + pos[n mod seq]; x, y (N,C), pos (P,C).
template <class T> DEVICE void add_pos(const T *x, const T *pos, T *y, i64 rows, i64 cols, i64 seq) {
	const int N = Pack<T>::N;
	const i64 packs = cols % N == 0 && wide(x, pos, y) ? cols / N : 0;
	u32 at = blockIdx.y % (u32)seq, step = gridDim.y % (u32)seq; // n mod seq, without a division a row
	BY_ROWS(n, rows) {
		const T *from = x + n * cols, *add = pos + at * cols;
		STRIDED(c, packs) {
			Pack<T> p = Pack<T>::at(from + c * N), q = Pack<T>::at(add + c * N);
			for (int j = 0; j < N; j++) p.v[j] = p.v[j] + q.v[j];
			p.to(y + n * cols + c * N);
		}
		if (!packs)
			STRIDED(c, cols) narrow(y + n * cols + c, load(from + c) + load(add + c));
		at += step;
		if (at >= (u32)seq) at -= (u32)seq;
	}
}

#define ADD_POS(T) \
	KERNEL(256, add_pos_##T, const int *skip, const T *x, const T *pos, T *y, i64 rows, i64 cols, i64 seq) { \
		SKIP(); \
		add_pos(x, pos, y, rows, cols, seq); \
	}
FOR_FLOATS(ADD_POS)

// AddPosGrad: dpos[s] = Σ dy[n] over n mod seq = s, in increasing order; rows of
// dpos (P,C) from seq on get 0, or stay where it is accumulated.
template <class T, class G> DEVICE void add_pos_grad(const T *dy, G *dpos, i64 rows, i64 cols, i64 seq, i64 positions, int accumulate) {
	const int N = Pack<T>::N;
	const i64 n = positions * cols, all = rows * cols, used = seq * cols;
	const i64 done = wide(dy, dpos) && used % N == 0 ? n / N * N : 0;
#pragma unroll 1
	for (i64 i = first() * N; i < done; i += stride() * N) {
		float sum[N] = {0};
		if (accumulate) get<N>(dpos + i, sum);
		if (i < used)
#pragma unroll 1
			for (i64 at = i; at < all; at += used) {
				Pack<T> p = Pack<T>::at(dy + at);
				for (int j = 0; j < N; j++) sum[j] += p.v[j];
			}
		put<N>(dpos + i, sum);
	}
#pragma unroll 1
	for (i64 i = done + first(); i < n; i += stride()) {
		float sum = accumulate ? load(dpos + i) : 0.0f;
		if (i < used)
#pragma unroll 1
			for (i64 at = i; at < all; at += used) sum += load(dy + at);
		narrow(dpos + i, sum);
	}
}

#define ADD_POS_GRAD(T, G) \
	KERNEL(256, add_pos_grad_##T##_##G, const int *skip, const T *dy, G *dpos, i64 rows, i64 cols, i64 seq, i64 positions, int accumulate) { \
		SKIP(); \
		add_pos_grad(dy, dpos, rows, cols, seq, positions, accumulate); \
	}
FOR_PAIRS(ADD_POS_GRAD)

// SelectRow: y (1,C) = row key[KeyRow] of x (N,C). A wrong row is told and gives 0.
#define SELECT_ROW(T) \
	KERNEL(256, select_row_##T, const int *skip, const T *x, const i64 *key, T *y, i64 rows, i64 cols, Report *report) { \
		SKIP(); \
		i64 r = key[3]; \
		bool ok = r >= 0 && r < rows; \
		if (!ok && first() == 0) wrong(report, 3, (int)r); \
		STRIDED(i, cols) narrow(y + i, ok ? load(x + r * cols + i) : 0.0f); \
	}
FOR_FLOATS(SELECT_ROW)

// Rotary positions. The table (Seq,D) has D/2 cosines, then D/2 sines for every
// position, computed in double with the CPU's own polynomials (package num).

DEVICE double log_(double x) { // of a positive, finite, normal x
	u64 b = (u64)__double_as_longlong(x);
	int e = (int)(b >> 52) - 1022;
	b = (b & ((1ull << 52) - 1)) | 1022ull << 52;
	u64 low = (b - 0x3fe6a09e667f3bcdull) >> 63; // 1 below √½
	double f = __longlong_as_double((i64)(b + (low << 52))) - 1;
	double k = (double)(e - (int)low);
	double s = f / (2 + f), s2 = s * s, s4 = s2 * s2;
	double t1 = s2 * (6.666666666666735130e-01 + s4 * (2.857142874366239149e-01 + s4 * (1.818357216161805012e-01 + s4 * 1.479819860511658591e-01)));
	double t2 = s4 * (3.999999999940941908e-01 + s4 * (2.222219843214978396e-01 + s4 * 1.531383769920937332e-01));
	double r = t1 + t2, h = 0.5 * f * f;
	return k * 6.93147180369123816490e-01 - ((h - (s * (h + r) + k * 1.90821492927058770002e-10)) - f);
}

DEVICE double exp64_(double x) { // of an x whose result is normal, or 0
	if (x < -700) return 0;
	double k = rint(1.44269504088896338700e+00 * x);
	double hi = x - k * 6.93147180369123816490e-01, lo = k * 1.90821492927058770002e-10, r = hi - lo, t = r * r;
	double c = r - t * (1.66666666666666657415e-01 + t * (-2.77777777770155933842e-03 + t * (6.61375632143793436117e-05 + t * (-1.65339022054652515390e-06 + t * 4.13813679705723846039e-08))));
	double y = 1 - ((lo - r * c / (2 - c)) - hi);
	return y * __longlong_as_double((i64)((int)k + 1023) << 52);
}

DEVICE void sincos_(double x, double *sin, double *cos) { // of 0 ≤ x < 2^29
	u64 j = (u64)(x * (4 / 3.14159265358979323846264338327950288));
	j += j & 1;
	double y = (double)j;
	double z = ((x - y * 7.85398125648498535156e-1) - y * 3.77489470793079817668e-8) - y * 2.69515142907905952645e-15, zz = z * z;
	double s = 1.58962301576546568060e-10;
	s = s * zz - 2.50507477628578072866e-8;
	s = s * zz + 2.75573136213857245213e-6;
	s = s * zz - 1.98412698295895385996e-4;
	s = s * zz + 8.33333333332211858878e-3;
	s = s * zz - 1.66666666666666307295e-1;
	s = z + z * zz * s;
	double c = -1.13585365213876817300e-11;
	c = c * zz + 2.08757008419747316778e-9;
	c = c * zz - 2.75573141792967388112e-7;
	c = c * zz + 2.48015872888517045348e-5;
	c = c * zz - 1.38888888888730564116e-3;
	c = c * zz + 4.16666666666665929218e-2;
	c = 1 - 0.5 * zz + zz * zz * c;
	u64 q = j >> 1;
	*sin = (q & 1) ? c : s;
	*cos = (q & 1) ? s : c;
	if (q >> 1 & 1) *sin = -*sin;
	if ((q + 1) >> 1 & 1) *cos = -*cos;
}

// rope_frequency is the radians a position of pair i: Theta^(-2i/D), scaled as
// Llama 3.1 does where factor is not 0.
DEVICE double rope_frequency(i64 i, i64 d, double theta, double factor, double low, double high, double original) {
	double f = exp64_((double)(-2 * i) / (double)d * log_(theta));
	if (factor == 0) return f;
	double wave = 2 * 3.14159265358979323846264338327950288 / f;
	if (wave > original / low) return f / factor;
	if (wave >= original / high) {
		double s = (original / wave - low) / (high - low);
		return (1 - s) * (f / factor) + s * f;
	}
	return f;
}

KERNEL(256, rope_table, const int *skip, float *table, i64 seq, i64 d, double theta, double factor, double low, double high, double original) {
	SKIP();
	const i64 h = d / 2;
	STRIDED(i, h) {
		const double frequency = rope_frequency(i, d, theta, factor, low, high, original);
		BY_ROWS(t, seq) {
			double sin, cos;
			sincos_((double)t * frequency, &sin, &cos);
			table[t * d + i] = (float)cos;
			table[t * d + h + i] = (float)sin;
		}
	}
}

// Rope turns the pairs (x[i], x[i+D/2]) of every head of a row by its position.
DEVICE void turn(float a, float b, float c, float s, float *ya, float *yb) {
	*ya = fma_(-b, s, a * c);
	*yb = fma_(a, s, b * c);
}

// turn_row turns a row of heads by one position's cosines and sines, N pairs at a time.
template <int N, class T> DEVICE void turn_row(const T *x, T *y, const float *cos, u32 heads, u32 h, int inverse) {
	const u32 per = h / N;
	for (u32 k = (u32)first(); k < heads * per; k += (u32)stride()) {
		const u32 head = k / per, i = (k - head * per) * N;
		const i64 at = (i64)head * (2 * h) + i;
		float a[N], b[N], c[N], s[N];
		if constexpr (N == 1) {
			turn(load(x + at), load(x + at + h), cos[i], inverse ? -cos[h + i] : cos[h + i], a, b);
			narrow(y + at, a[0]), narrow(y + at + h, b[0]);
		} else {
			get<N>(x + at, a), get<N>(x + at + h, b), get<N>(cos + i, c), get<N>(cos + h + i, s);
#pragma unroll
			for (int j = 0; j < N; j++) turn(a[j], b[j], c[j], inverse ? -s[j] : s[j], a + j, b + j);
			put<N>(y + at, a), put<N>(y + at + h, b);
		}
	}
}

template <class T> DEVICE void rope(const T *x, T *y, const float *table, i64 rows, i64 heads, i64 d, i64 seq, int inverse) {
	const u32 h = (u32)(d / 2), N = Pack<T>::N;
	const bool packs = h % N == 0 && wide(x, y, table);
	u32 at = blockIdx.y % (u32)seq, step = gridDim.y % (u32)seq; // the row's position
	BY_ROWS(n, rows) {
		const i64 row = n * heads * d;
		if (packs) turn_row<Pack<T>::N>(x + row, y + row, table + at * d, (u32)heads, h, inverse);
		else turn_row<1>(x + row, y + row, table + at * d, (u32)heads, h, inverse);
		at += step;
		if (at >= (u32)seq) at -= (u32)seq;
	}
}

#define ROPE(T) \
	KERNEL(256, rope_##T, const int *skip, const T *x, T *y, const float *table, i64 rows, i64 heads, i64 d, i64 seq, int inverse) { \
		SKIP(); \
		rope(x, y, table, rows, heads, d, seq, inverse); \
	}
FOR_FLOATS(ROPE)
