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

// norms_of has a block turn two accumulators into norms: it reads them at once, into shared
// memory, and a thread of two warps each rounds one.
DEVICE void norms_of(const i64 *acc, i64 *limbs, double *norms) {
	for (int i = threadIdx.x; i < 2 * LIMBS; i += blockDim.x) limbs[i] = acc[i];
	__syncthreads();
	if (threadIdx.x < 64 && threadIdx.x % 32 == 0) {
		i64 *mine = limbs + threadIdx.x / 32 * LIMBS;
		norms[threadIdx.x / 32] = norm_of(mine, mine);
	}
	__syncthreads();
}

struct SquareOf { __device__ __forceinline__ double operator()(double x) const { return x * x; } };

template <class T> DEVICE void squares(const T *x, i64 from, i64 hi, u64 *digits) {
	const int threads = BLOCK_LANES / Pack<T>::N; // of a block of 256
	const bool packs = wide(x + from);
	for (i64 base = from; base < hi; base += (i64)blockDim.x / threads * BLOCK) {
		const i64 b = base + (i64)(threadIdx.x / threads) * BLOCK;
		const double v = sum_block(x, b, hi, packs, SquareOf());
		if (threadIdx.x % threads == 0 && b < hi) exact_add(digits, v);
	}
}

// sum_squares adds the squares of a piece of a span to an accumulator: sums of
// blocks of 256 in double, then digits.
DEVICE void sum_squares(const void *x, int type, const Spans &s, i64 *accumulators, i64 every, i64 which) {
	SHARED(u64, digits, LIMBS);
	for (int i = threadIdx.x; i < LIMBS; i += blockDim.x) digits[i] = 0;
	__syncthreads();
	i64 from;
	int span = find(s, PIECE, &from);
	i64 hi = from + PIECE < s.hi[span] ? from + PIECE : s.hi[span];
	if (type == 0) squares((const float *)x, from, hi, digits);
	else if (type == 1) squares((const bf16 *)x, from, hi, digits);
	else squares((const f16 *)x, from, hi, digits);
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

// Operands of an update: K buffers of f32 that it reads and writes, one of any type that
// it reads, and the 16-bit copy of the first (none: type 0).
template <int K> struct Operands {
	float *x[K];
	const void *g;
	void *low;
	int g_type, low_type;

	// wide says whether all can be read 16 bytes at a time from element i on.
	__device__ __forceinline__ bool wide(i64 i) const {
		bool all = ::wide((const char *)g + i * (g_type ? 2 : 4)) && (!low_type || ::wide((const char *)low + 2 * i));
#pragma unroll
		for (int k = 0; k < K; k++) all = all && ::wide(x[k] + i);
		return all;
	}
};

// update applies a rule to a block's chunk of its span: rule(g, x) of an element g and its
// K elements of x. A thread takes two quads at a time. They are neighbours where an
// operand has 16 bits, for 16 bytes of it; where none has, and the chunk is whole, the
// quads of a warp are, so that all of a sector is asked for at once.
template <int K, class Rule> DEVICE void update(const Operands<K> &o, const Spans &s, int span, i64 from, const Rule &rule) {
	const i64 to = from + CHUNK < s.hi[span] ? from + CHUNK : s.hi[span], done = o.wide(from) ? to - (to - from) % 8 : from;
	const bool neighbours = o.g_type || o.low_type || to - from < CHUNK;
	const int far = neighbours ? 4 : 4 * blockDim.x;
#pragma unroll 1
	for (i64 i = from + (neighbours ? 8 : 4) * threadIdx.x; i < done; i += 8 * blockDim.x) {
		float g[8], x[K][8];
		if (o.g_type == 1) get<8>((const bf16 *)o.g + i, g);
		else if (o.g_type == 2) get<8>((const f16 *)o.g + i, g);
		else get<4>((const float *)o.g + i, g), get<4>((const float *)o.g + i + far, g + 4);
#pragma unroll
		for (int k = 0; k < K; k++) get<4>(o.x[k] + i, x[k]), get<4>(o.x[k] + i + far, x[k] + 4);
#pragma unroll
		for (int j = 0; j < 8; j++) {
			float e[K];
#pragma unroll
			for (int k = 0; k < K; k++) e[k] = x[k][j];
			rule(g[j], e);
#pragma unroll
			for (int k = 0; k < K; k++) x[k][j] = e[k];
		}
#pragma unroll
		for (int k = 0; k < K; k++) put<4>(o.x[k] + i, x[k]), put<4>(o.x[k] + i + far, x[k] + 4);
		if (o.low_type == 1) put<8>((bf16 *)o.low + i, x[0]);
		if (o.low_type == 2) put<8>((f16 *)o.low + i, x[0]);
	}
#pragma unroll 1
	for (i64 i = done + threadIdx.x; i < to; i += blockDim.x) {
		float e[K];
#pragma unroll
		for (int k = 0; k < K; k++) e[k] = o.x[k][i];
		rule(load_as(o.g, o.g_type, i), e);
#pragma unroll
		for (int k = 0; k < K; k++) o.x[k][i] = e[k];
		store_low(o.low, o.low_type, i, e[0]);
	}
}

struct AdamWRule { // of p, m, v
	Adam a;
	__device__ __forceinline__ void operator()(float g, float *x) const {
		float d = a.moments(g, x + 1, x + 2);
		x[0] = fma_(-a.step, x[1] / d, x[0] * a.keep);
	}
};

KERNEL(256, adamw, const int *skip, const void *g, const float *coef, const double *hyper, float *p, float *m, float *v, void *low,
	Spans s, double beta1, double beta2, double eps, int grad_type, int low_type) {
	SKIP();
	SHARED(Adam, shared, 1);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) *shared = adam_of(*coef, hyper, beta1, beta2, eps, 1 - hyper[LR] * s.decay[span], hyper[LR] / hyper[BC1]);
	__syncthreads();
	update(Operands<3>{{p, m, v}, g, low, grad_type, low_type}, s, span, from, AdamWRule{*shared});
}

struct LambRule { // of g, m, v, by an element of p
	Adam a;
	__device__ __forceinline__ void operator()(float p, float *x) const {
		float d = a.moments(x[0], x + 1, x + 2);
		x[0] = fma_(a.keep, p, x[1] * a.step / d);
	}
};

// LAMBDirection replaces the gradient by the direction.
KERNEL(256, lamb_direction, const int *skip, const float *p, const float *coef, const double *hyper, float *g, float *m, float *v,
	Spans s, double beta1, double beta2, double eps) {
	SKIP();
	SHARED(Adam, shared, 1);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (threadIdx.x == 0) *shared = adam_of(*coef, hyper, beta1, beta2, eps, s.decay[span], 1 / hyper[BC1]);
	__syncthreads();
	update(Operands<3>{{g, m, v}, p, 0, 0, 0}, s, span, from, LambRule{*shared});
}

struct Descend { // of p
	float f;
	__device__ __forceinline__ void operator()(float g, float *x) const { x[0] = fma_(f, g, x[0]); }
};

KERNEL(256, lamb_apply, const int *skip, const void *g, const i64 *norms, const double *hyper, float *p, void *low, Spans s, int grad_type, int low_type) {
	SKIP();
	SHARED(float, step, 1);
	SHARED(i64, limbs, 2 * LIMBS);
	SHARED(double, both, 2);
	i64 from;
	int span = find(s, CHUNK, &from);
	norms_of(norms + 2 * LIMBS * s.param[span], limbs, both);
	if (threadIdx.x == 0) {
		double np = both[0], nu = both[1];
		*step = (float)(hyper[LR] * (np > 0 && nu > 0 ? np / nu : 1));
	}
	__syncthreads();
	update(Operands<1>{{p}, g, low, grad_type, low_type}, s, span, from, Descend{-*step});
}

// Momentum is the factors of SGD's kin.
struct Momentum { float scale, decay, rate, momentum, step; };

struct MomentumRule { // of p, b
	Momentum k;
	bool nesterov;
	__device__ __forceinline__ void operator()(float g, float *x) const {
		float d = k.rate * fma_(k.decay, x[0], g * k.scale);
		float u = fma_(k.momentum, x[1], d);
		x[1] = u;
		if (nesterov) u = fma_(k.momentum, u, d);
		x[0] = fma_(-k.step, u, x[0]);
	}
};

// How rate, step and scale follow from the learning rate and the norms.
enum { SGD, LARS, LARC, NOVOGRAD };

KERNEL(256, momentum, const int *skip, const void *g, const i64 *norms, const float *coef, const double *hyper, float *p, float *b, const float *second, void *low,
	Spans s, double beta, double eps, double trust, double unadapted, int rule, int nesterov, int grad_type, int low_type) {
	SKIP();
	SHARED(Momentum, shared, 1);
	SHARED(i64, limbs, 2 * LIMBS);
	SHARED(double, both, 2);
	i64 from;
	int span = find(s, CHUNK, &from);
	if (rule == LARS || rule == LARC) norms_of(norms + 2 * LIMBS * s.param[span], limbs, both);
	if (threadIdx.x == 0) {
		double c = *coef, lr = hyper[LR], decay = s.decay[span], scale = c, rate = 1, step = lr;
		if (rule == LARS || rule == LARC) {
			double np = both[0], ng = both[1] * c, ratio = unadapted;
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
	update(Operands<2>{{p, b}, g, low, grad_type, low_type}, s, span, from, MomentumRule{*shared, nesterov != 0});
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
