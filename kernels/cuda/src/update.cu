// Optimizers, norms and the loss scale. Scalars are combined in double and
// rounded to float once; elements are updated in float, in the CPU's order of
// operations, so that the bits are the CPU's.

// Slots of the hyper buffer: graph.Hyper….
enum { LR, INV_COUNT, LOSS_SCALE, BC1, BC2 };

// Spans are parts of a rank's buffers, one after the other over the grid: a
// block takes CHUNK elements of one of them.
#define SPANS 16
struct Spans {
	i64 n;
	i64 lo[SPANS], hi[SPANS]; // elements
	i64 block[SPANS];         // the span's first block
	i64 param[SPANS];         // of the unit
	double decay[SPANS];
};

#define CHUNK 4096  // elements of a block of an update
#define PIECE 65536 // elements of a block of a norm, as the CPU's tasks
#define BLOCK 256   // elements of one addend of a norm

// find returns the span of the block, and the first element that it takes.
DEVICE int find(const Spans &s, i64 chunk, i64 *from) {
	int i = (int)s.n - 1;
	while (i > 0 && s.block[i] > (i64)blockIdx.x) i--;
	*from = s.lo[i] + ((i64)blockIdx.x - s.block[i]) * chunk;
	return i;
}

// Gradients and 16-bit copies of parameters, by type: 0 f32, 1 bf16, 2 f16.
DEVICE float load_as(const void *p, int type, i64 i) {
	return type == 0 ? ((const float *)p)[i] : type == 1 ? load((const bf16 *)p + i) : load((const f16 *)p + i);
}
DEVICE void store_low(void *p, int type, i64 i, float x) {
	if (type == 1) narrow((bf16 *)p + i, x);
	if (type == 2) narrow((f16 *)p + i, x);
}

// The exact accumulator of package exact: 69 digits of 32 bits, then the numbers
// of NaN, +Inf and -Inf among the addends.
#define DIGITS 69
#define LIMBS 72

DEVICE void exact_add(u64 *a, double x) {
	u64 b = (u64)__double_as_longlong(x), m = b & ((1ull << 52) - 1);
	int e = (int)(b >> 52 & 0x7ff);
	if (e == 0x7ff) {
		atomicAdd(a + (m ? DIGITS : b >> 63 ? DIGITS + 2 : DIGITS + 1), 1ull);
		return;
	}
	if (e == 0) e = 1;
	else m |= 1ull << 52;
	int limb = (e - 1) / 32, shift = (e - 1) % 32;
	u64 lo = m << shift, hi = shift ? m >> (64 - shift) : 0;
	u64 d[3] = {lo & 0xffffffffu, lo >> 32, hi};
	for (int i = 0; i < 3; i++) atomicAdd(a + limb + i, b >> 63 ? 0 - d[i] : d[i]);
}

DEVICE void exact_normalize(i64 *a) {
	i64 carry = 0;
#pragma unroll 1
	for (int i = 0; i < DIGITS - 1; i++) {
		i64 v = a[i] + carry;
		carry = v >> 32;
		a[i] = v & 0xffffffff;
	}
	a[DIGITS - 1] += carry;
}

// exact_value rounds an accumulator to nearest even. It needs LIMBS digits of shared
// memory, of the calling thread its own; local memory would be reserved for every
// thread that the GPU can hold.
DEVICE double exact_value(const i64 *a, i64 *d) {
	const double inf = __longlong_as_double(0x7ff0000000000000ll);
	if (a[DIGITS] != 0 || (a[DIGITS + 1] != 0 && a[DIGITS + 2] != 0)) return __longlong_as_double(0x7ff8000000000000ll);
	if (a[DIGITS + 1] != 0) return inf;
	if (a[DIGITS + 2] != 0) return -inf;
#pragma unroll 1
	for (int i = 0; i < LIMBS; i++) d[i] = i < DIGITS ? a[i] : 0;
	exact_normalize(d);
	double sign = 1;
	if (d[DIGITS - 1] < 0) {
		sign = -1;
#pragma unroll 1
		for (int i = 0; i < DIGITS; i++) d[i] = -d[i];
		exact_normalize(d);
	}
	int top = DIGITS - 1;
	while (top >= 0 && d[top] == 0) top--;
	if (top < 0) return 0;
	if (d[top] > 0xffffffffll) return sign * inf;
	int pos = 32 * top + 63 - __clzll(d[top]);
	int low = pos > 52 ? pos - 52 : 0;
	int limb = low / 32, shift = low % 32;
	u64 m = (u64)d[limb] >> shift | (u64)d[limb + 1] << (32 - shift);
	if (shift > 0) m |= (u64)d[limb + 2] << (64 - shift);
	m &= (1ull << 53) - 1;
	if (low > 0 && (d[(low - 1) / 32] >> ((low - 1) % 32) & 1)) {
		bool up = m & 1;
		int below = low - 1;
#pragma unroll 1
		for (int k = 0; k < below / 32 && !up; k++) up = d[k] != 0;
		up = up || (d[below / 32] & ((1ll << (below % 32)) - 1)) != 0;
		if (up) m++;
	}
	// m·2^(low-1074): a normal number of 53 bits, or a subnormal one as it is.
	if (low == 0) return sign * __longlong_as_double((i64)m);
	if (m >> 53) m >>= 1, low++; // rounded up to the next power of two
	if (low > 2046 - 1) return sign * inf;
	return sign * __longlong_as_double((i64)((u64)low << 52) + (i64)m);
}

DEVICE double norm_of(const i64 *acc, i64 *digits) { return sqrt(exact_value(acc, digits)); }

// squares is a lane's share of a block, every 16th element: all reads are under way
// before the first is used.
template <class T> DEVICE double squares(const T *x, i64 i, i64 block, i64 hi) {
	double v = 0;
	if (block + BLOCK <= hi) {
		float e[BLOCK / 16];
#pragma unroll
		for (int k = 0; k < BLOCK / 16; k++) e[k] = load(x + i + 16 * k);
#pragma unroll
		for (int k = 0; k < BLOCK / 16; k++) v += (double)e[k] * (double)e[k];
		return v;
	}
#pragma unroll 1
	for (; i < hi; i += 16) {
		double e = (double)load(x + i);
		v += e * e;
	}
	return v;
}

// sum_squares adds the squares of a piece of a span to an accumulator: sums of
// blocks of 256 in double, 16 lanes each, then digits.
DEVICE void sum_squares(const void *x, int type, const Spans &s, i64 *accumulators, i64 every, i64 which) {
	SHARED(u64, digits, LIMBS);
	for (int i = threadIdx.x; i < LIMBS; i += blockDim.x) digits[i] = 0;
	__syncthreads();
	i64 from;
	int span = find(s, PIECE, &from);
	i64 hi = from + PIECE < s.hi[span] ? from + PIECE : s.hi[span];
	int lane = threadIdx.x % 16;
	for (i64 base = from; base < hi; base += (i64)blockDim.x / 16 * BLOCK) {
		i64 b = base + (i64)(threadIdx.x / 16) * BLOCK;
		double v = 0;
		if (type == 0) v = squares((const float *)x, b + lane, b, hi);
		else if (type == 1) v = squares((const bf16 *)x, b + lane, b, hi);
		else v = squares((const f16 *)x, b + lane, b, hi);
		for (int h = 8; h > 0; h >>= 1) v += __shfl_down_sync(0xffffffffu, v, h, 16);
		if (lane == 0 && b < hi) exact_add(digits, v);
	}
	__syncthreads();
	if (threadIdx.x == 0) exact_normalize((i64 *)digits);
	__syncthreads();
	u64 *acc = (u64 *)accumulators + (s.param[span] * every + which) * LIMBS;
	for (int i = threadIdx.x; i < LIMBS; i += blockDim.x)
		if (digits[i] != 0) atomicAdd(acc + i, digits[i]);
}

// SqSum has one accumulator for all parameters, ParamNorms two for each.
KERNEL(256, sqsum, const int *skip, const void *x, i64 *accumulators, Spans s, int type, int every, int which) {
	SKIP();
	sum_squares(x, type, s, accumulators, every, which);
}

KERNEL(32, clip_coef, const int *skip, const i64 *acc, const double *hyper, float *coef, double *norm, double limit) {
	SKIP();
	SHARED(i64, digits, LIMBS);
	if (threadIdx.x != 0) return;
	double scale = hyper[LOSS_SCALE], n = norm_of(acc, digits) / scale, c = 1 / scale;
	if (limit > 0) {
		double q = limit / (n + 1e-6);
		c *= q < 1 || q != q ? q : 1;
	}
	*coef = (float)c;
	*norm = n;
}

KERNEL(32, overflow_check, const int *skip, const i64 *acc, int *flag) {
	SKIP();
	SHARED(i64, digits, LIMBS);
	if (threadIdx.x != 0) return;
	double v = exact_value(acc, digits);
	*flag = v - v != 0;
}

KERNEL(32, loss_scale_update, const int *skip, const int *flag, double *state, double growth, double backoff, double floor, i64 interval, i64 hysteresis) {
	SKIP();
	if (threadIdx.x != 0) return;
	if (*flag != 0) {
		double in_row = 1 - (state[1] < 0 ? state[1] : 0);
		if (in_row < (double)hysteresis) {
			state[1] = -in_row;
			return;
		}
		double s = state[0] * backoff;
		state[0] = s > floor || s != s ? s : floor;
		state[1] = 0;
		return;
	}
	double clean = (state[1] < 0 ? 0 : state[1]) + 1;
	if (clean >= (double)interval) {
		state[0] *= growth;
		clean = 0;
	}
	state[1] = clean;
}

// Adam is the factors of Adam's kin.
struct Adam {
	float scale, keep, beta1, rest1, beta2, rest2, root2, eps, step;

	// direction returns the denominator and moves the moments.
	__device__ __forceinline__ float moments(float g, float *m, float *v) const {
		g = g * scale;
		*m = fma_(rest1, g, beta1 * *m);
		*v = fma_(rest2, g * g, beta2 * *v);
		return fma_(sqrt_(*v), root2, eps);
	}
};

DEVICE Adam adam_of(float coef, const double *hyper, double beta1, double beta2, double eps, double keep, double step) {
	Adam a;
	a.scale = coef, a.keep = (float)keep;
	a.beta1 = (float)beta1, a.rest1 = (float)(1 - beta1);
	a.beta2 = (float)beta2, a.rest2 = (float)(1 - beta2);
	a.root2 = (float)(1 / sqrt(hyper[BC2]));
	a.eps = (float)eps, a.step = (float)step;
	return a;
}

// Four elements of a buffer at a time, where all buffers allow it.
DEVICE void four(const float *p, i64 i, int n, bool packs, float *v) {
	if (packs && n == 4) {
		get<4>(p + i, v);
		return;
	}
	for (int j = 0; j < 4; j++) v[j] = j < n ? p[i + j] : 0.0f;
}
// grads reads four gradients of any type, put_low writes the 16-bit copy.
DEVICE void grads(const void *p, int type, i64 i, int n, bool packs, float *v) {
	if (packs && n == 4) {
		if (type == 0) get<4>((const float *)p + i, v);
		else if (type == 1) get<4>((const bf16 *)p + i, v);
		else get<4>((const f16 *)p + i, v);
		return;
	}
	for (int j = 0; j < 4; j++) v[j] = j < n ? load_as(p, type, i + j) : 0.0f;
}
DEVICE void put_low(void *p, int type, i64 i, int n, bool packs, const float *v) {
	if (type == 0) return;
	if (packs && n == 4) {
		if (type == 1) put<4>((bf16 *)p + i, v);
		else put<4>((f16 *)p + i, v);
		return;
	}
	for (int j = 0; j < n; j++) store_low(p, type, i + j, v[j]);
}

// apart says whether four elements from i on lie at a multiple of their size.
DEVICE bool apart(const void *p, int type, i64 i) { return type == 0 ? quads((const float *)p + i) : quads((const bf16 *)p + i); }

DEVICE void put4(float *p, i64 i, int n, bool packs, const float *v) {
	if (packs && n == 4) {
		put<4>(p + i, v);
		return;
	}
	for (int j = 0; j < n; j++) p[i + j] = v[j];
}

// FOURS walks over a block's part of its span: elements i to i+n-1.
#define FOURS(i, n) \
	_Pragma("unroll 1") for (i64 i = from + 4 * (i64)threadIdx.x; i < from + CHUNK && i < s.hi[span]; i += 4 * (i64)blockDim.x) \
		if (int n = s.hi[span] - i < 4 ? (int)(s.hi[span] - i) : 4)

KERNEL(256, adamw, const int *skip, const void *g, const float *coef, const double *hyper, float *p, float *m, float *v, void *low,
	Spans s, double beta1, double beta2, double eps, int grad_type, int low_type) {
	SKIP();
	SHARED(Adam, shared, 1);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) *shared = adam_of(*coef, hyper, beta1, beta2, eps, 1 - hyper[LR] * s.decay[span], hyper[LR] / hyper[BC1]);
	__syncthreads();
	const Adam a = *shared;
	const bool packs = wide(p + from, m + from, v + from), whole = apart(g, grad_type, from), half = apart(low, low_type, from);
	FOURS(i, n) {
		float gi[4], pi[4], mi[4], vi[4];
		grads(g, grad_type, i, n, whole, gi);
		four(p, i, n, packs, pi), four(m, i, n, packs, mi), four(v, i, n, packs, vi);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float d = a.moments(gi[j], mi + j, vi + j);
			pi[j] = fma_(-a.step, mi[j] / d, pi[j] * a.keep);
		}
		put4(p, i, n, packs, pi), put4(m, i, n, packs, mi), put4(v, i, n, packs, vi);
		put_low(low, low_type, i, n, half, pi);
	}
}

// LAMBDirection replaces the gradient by the direction.
KERNEL(256, lamb_direction, const int *skip, const float *p, const float *coef, const double *hyper, float *g, float *m, float *v,
	Spans s, double beta1, double beta2, double eps) {
	SKIP();
	SHARED(Adam, shared, 1);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) *shared = adam_of(*coef, hyper, beta1, beta2, eps, s.decay[span], 1 / hyper[BC1]);
	__syncthreads();
	const Adam a = *shared;
	const bool packs = wide(p + from, g + from, m + from, v + from);
	FOURS(i, n) {
		float gi[4], pi[4], mi[4], vi[4];
		four(p, i, n, packs, pi), four(g, i, n, packs, gi), four(m, i, n, packs, mi), four(v, i, n, packs, vi);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float d = a.moments(gi[j], mi + j, vi + j);
			gi[j] = fma_(a.keep, pi[j], mi[j] * a.step / d);
		}
		put4(g, i, n, packs, gi), put4(m, i, n, packs, mi), put4(v, i, n, packs, vi);
	}
}

KERNEL(256, lamb_apply, const int *skip, const void *g, const i64 *norms, const double *hyper, float *p, void *low, Spans s, int grad_type, int low_type) {
	SKIP();
	SHARED(float, step, 1);
	SHARED(i64, digits, LIMBS);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) {
		const i64 *acc = norms + 2 * LIMBS * s.param[span];
		double np = norm_of(acc, digits), nu = norm_of(acc + LIMBS, digits);
		*step = (float)(hyper[LR] * (np > 0 && nu > 0 ? np / nu : 1));
	}
	__syncthreads();
	const float f = -*step;
	const bool packs = wide(p + from), whole = apart(g, grad_type, from), half = apart(low, low_type, from);
	FOURS(i, n) {
		float gi[4], x[4];
		grads(g, grad_type, i, n, whole, gi);
		four(p, i, n, packs, x);
#pragma unroll
		for (int j = 0; j < 4; j++) x[j] = fma_(f, gi[j], x[j]);
		put4(p, i, n, packs, x);
		put_low(low, low_type, i, n, half, x);
	}
}

// Momentum is the factors of SGD's kin.
struct Momentum { float scale, decay, rate, momentum, step; };

// How rate, step and scale follow from the learning rate and the norms.
enum { SGD, LARS, LARC, NOVOGRAD };

KERNEL(256, momentum, const int *skip, const void *g, const i64 *norms, const float *coef, const double *hyper, float *p, float *b, const float *second, void *low,
	Spans s, double beta, double eps, double trust, double unadapted, int rule, int nesterov, int grad_type, int low_type) {
	SKIP();
	SHARED(Momentum, shared, 1);
	SHARED(i64, digits, LIMBS);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) {
		double c = *coef, lr = hyper[LR], decay = s.decay[span], scale = c, rate = 1, step = lr;
		if (rule == LARS || rule == LARC) {
			const i64 *acc = norms + 2 * LIMBS * s.param[span];
			double np = norm_of(acc, digits), ng = norm_of(acc + LIMBS, digits) * c, ratio = unadapted;
			if (np > 0 && ng > 0) {
				ratio = trust * np / (ng + decay * np);
				if (rule == LARC) {
					double q = ratio / lr;
					ratio = q < 1 || q != q ? q : 1;
				}
			}
			if (rule == LARC) rate = ratio;
			else rate = lr * ratio, step = 1;
		} else if (rule == NOVOGRAD) {
			scale = c / (sqrt((double)second[s.param[span]]) + eps);
		}
		*shared = Momentum{(float)scale, (float)decay, (float)rate, (float)beta, (float)step};
	}
	__syncthreads();
	const Momentum k = *shared;
	const bool packs = wide(p + from, b + from), whole = apart(g, grad_type, from), half = apart(low, low_type, from);
	FOURS(i, n) {
		float gi[4], x[4], bi[4];
		grads(g, grad_type, i, n, whole, gi);
		four(p, i, n, packs, x), four(b, i, n, packs, bi);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			float d = k.rate * fma_(k.decay, x[j], gi[j] * k.scale);
			float u = fma_(k.momentum, bi[j], d);
			bi[j] = u;
			if (nesterov) u = fma_(k.momentum, u, d);
			x[j] = fma_(-k.step, u, x[j]);
		}
		put4(p, i, n, packs, x), put4(b, i, n, packs, bi);
		put_low(low, low_type, i, n, half, x);
	}
}

// NovoGrad's second moments, one for each trainable parameter of the unit: n of
// them, numbered by params.
struct Params { i64 n; i64 at[64]; };

KERNEL(64, novograd_moments, const int *skip, const i64 *norms, const float *coef, float *v, Params params, double beta2) {
	SKIP();
	SHARED(i64, digits, 64 * LIMBS);
	if ((i64)threadIdx.x >= params.n) return;
	i64 j = params.at[threadIdx.x];
	double n = norm_of(norms + (2 * j + 1) * LIMBS, digits + threadIdx.x * LIMBS) * (double)*coef, square = n * n, old = v[j];
	v[j] = (float)(old == 0 ? square : beta2 * old + (1 - beta2) * square);
}
