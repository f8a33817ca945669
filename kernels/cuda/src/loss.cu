// Softmax, cross-entropy and the head's loss: see bind_loss.go. A block of up to
// ROW_THREADS threads, whole warps, takes a row; which thread takes which elements, and so every sum's
// order, depends on the row's length alone.

#define ROW_THREADS 256

struct F4 { float x, y, z, w; };

// four reads four consecutive elements, those from n on as pad; wide says that
// all rows begin at multiples of four elements of memory.
DEVICE F4 four(const float *p, i64 i, i64 n, int wide, float pad) {
	F4 v;
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 16);
		float4 f = *(const float4 *)(p + i);
		v.x = f.x, v.y = f.y, v.z = f.z, v.w = f.w;
		return v;
	}
	v.x = i < n ? p[i] : pad;
	v.y = i + 1 < n ? p[i + 1] : pad;
	v.z = i + 2 < n ? p[i + 2] : pad;
	v.w = i + 3 < n ? p[i + 3] : pad;
	return v;
}

DEVICE F4 four(const bf16 *p, i64 i, i64 n, int wide, float pad) {
	F4 v;
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 8);
		uint2 h = *(const uint2 *)(p + i);
		v.x = of_bits(h.x << 16), v.y = of_bits(h.x & 0xffff0000u);
		v.z = of_bits(h.y << 16), v.w = of_bits(h.y & 0xffff0000u);
		return v;
	}
	v.x = i < n ? load(p + i) : pad;
	v.y = i + 1 < n ? load(p + i + 1) : pad;
	v.z = i + 2 < n ? load(p + i + 2) : pad;
	v.w = i + 3 < n ? load(p + i + 3) : pad;
	return v;
}

DEVICE F4 four(const f16 *p, i64 i, i64 n, int wide, float pad) {
	F4 v;
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 8);
		uint2 h = *(const uint2 *)(p + i);
		v.x = f16_at(h.x), v.y = f16_at(h.x >> 16);
		v.z = f16_at(h.y), v.w = f16_at(h.y >> 16);
		return v;
	}
	v.x = i < n ? load(p + i) : pad;
	v.y = i + 1 < n ? load(p + i + 1) : pad;
	v.z = i + 2 < n ? load(p + i + 2) : pad;
	v.w = i + 3 < n ? load(p + i + 3) : pad;
	return v;
}

DEVICE void put_four(float *p, i64 i, i64 n, int wide, F4 v) {
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 16);
		float4 f;
		f.x = v.x, f.y = v.y, f.z = v.z, f.w = v.w;
		*(float4 *)(p + i) = f;
		return;
	}
	if (i < n) p[i] = v.x;
	if (i + 1 < n) p[i + 1] = v.y;
	if (i + 2 < n) p[i + 2] = v.z;
	if (i + 3 < n) p[i + 3] = v.w;
}

DEVICE void put_four(bf16 *p, i64 i, i64 n, int wide, F4 v) {
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 8);
		uint2 h;
		h.x = two_bf16(v.x, v.y), h.y = two_bf16(v.z, v.w);
		*(uint2 *)(p + i) = h;
		return;
	}
	if (i < n) narrow(p + i, v.x);
	if (i + 1 < n) narrow(p + i + 1, v.y);
	if (i + 2 < n) narrow(p + i + 2, v.z);
	if (i + 3 < n) narrow(p + i + 3, v.w);
}

DEVICE void put_four(f16 *p, i64 i, i64 n, int wide, F4 v) {
	if (wide && i + 3 < n) {
		ALIGNED(p + i, 8);
		uint2 h = {two_f16(v.x, v.y), two_f16(v.z, v.w)};
		*(uint2 *)(p + i) = h;
		return;
	}
	if (i < n) narrow(p + i, v.x);
	if (i + 1 < n) narrow(p + i + 1, v.y);
	if (i + 2 < n) narrow(p + i + 2, v.z);
	if (i + 3 < n) narrow(p + i + 3, v.w);
}

// Block reductions in a fixed order; every thread gets the result, and may call
// again at once.
DEVICE float row_sum(float x) {
	SHARED(float, part, ROW_THREADS / 32);
	int warps = blockDim.x / 32;
	x = warp_sum(x);
	if (warps == 1) return x;
	if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
	__syncthreads();
	x = 0;
	for (int w = 0; w < warps; w++) x += part[w];
	__syncthreads();
	return x;
}

DEVICE float row_max(float x) {
	SHARED(float, most, ROW_THREADS / 32);
	int warps = blockDim.x / 32;
	x = warp_max(x);
	if (warps == 1) return x;
	if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = x;
	__syncthreads();
	x = most[0];
	for (int w = 1; w < warps; w++) x = most[w] > x ? most[w] : x;
	__syncthreads();
	return x;
}

#define NEG_INF of_bits(0xff800000u)

// Stats is the largest element of a row and Σ exp(x − most). The sum is NaN
// where the row has a NaN, +Inf, or −Inf alone.
struct Stats { float most, sum; };

DEVICE void take(Stats &s, float x) {
	if (x > s.most) {
		s.sum = s.sum * expf(s.most - x) + 1;
		s.most = x;
	} else if (x != NEG_INF) {
		s.sum += expf(x - s.most);
	}
}

template <class T> DEVICE Stats stats_of_row(const T *x, i64 n, int wide) {
	Stats s;
	s.most = NEG_INF, s.sum = 0;
	for (i64 i = 4 * (i64)threadIdx.x; i < n; i += 4 * (i64)blockDim.x) {
		F4 v = four(x, i, n, wide, NEG_INF);
		take(s, v.x), take(s, v.y), take(s, v.z), take(s, v.w);
	}
	Stats r;
	r.most = row_max(s.most);
	r.sum = row_sum(s.sum * expf(s.most - r.most));
	return r;
}

DEVICE float log_sum_exp(Stats s) { return (float)((double)s.most + log((double)s.sum)); }

template <class T> DEVICE void softmax(const T *x, T *y, i64 n, int wide) {
	x += blockIdx.x * n, y += blockIdx.x * n;
	Stats s = stats_of_row(x, n, wide);
	float inverse = 1 / s.sum;
	for (i64 i = 4 * (i64)threadIdx.x; i < n; i += 4 * (i64)blockDim.x) {
		F4 v = four(x, i, n, wide, 0);
		v.x = expf(v.x - s.most) * inverse, v.y = expf(v.y - s.most) * inverse;
		v.z = expf(v.z - s.most) * inverse, v.w = expf(v.w - s.most) * inverse;
		put_four(y, i, n, wide, v);
	}
}

KERNEL(ROW_THREADS, softmax_f32, const int *skip, const float *x, float *y, i64 n, int wide) {
	SKIP();
	softmax(x, y, n, wide);
}

KERNEL(ROW_THREADS, softmax_bf16, const int *skip, const bf16 *x, bf16 *y, i64 n, int wide) {
	SKIP();
	softmax(x, y, n, wide);
}

KERNEL(ROW_THREADS, softmax_f16, const int *skip, const f16 *x, f16 *y, i64 n, int wide) {
	SKIP();
	softmax(x, y, n, wide);
}

template <class T> DEVICE void softmax_grad(const T *dy, const T *y, T *dx, i64 n, int wide, int accumulate) {
	dy += blockIdx.x * n, y += blockIdx.x * n, dx += blockIdx.x * n;
	float dot = 0;
	for (i64 i = 4 * (i64)threadIdx.x; i < n; i += 4 * (i64)blockDim.x) {
		F4 a = four(dy, i, n, wide, 0), b = four(y, i, n, wide, 0);
		dot = fma_(a.x, b.x, dot), dot = fma_(a.y, b.y, dot);
		dot = fma_(a.z, b.z, dot), dot = fma_(a.w, b.w, dot);
	}
	dot = row_sum(dot);
	for (i64 i = 4 * (i64)threadIdx.x; i < n; i += 4 * (i64)blockDim.x) {
		F4 a = four(dy, i, n, wide, 0), b = four(y, i, n, wide, 0);
		a.x = b.x * (a.x - dot), a.y = b.y * (a.y - dot), a.z = b.z * (a.z - dot), a.w = b.w * (a.w - dot);
		if (accumulate) {
			F4 c = four(dx, i, n, wide, 0);
			a.x += c.x, a.y += c.y, a.z += c.z, a.w += c.w;
		}
		put_four(dx, i, n, wide, a);
	}
}

KERNEL(ROW_THREADS, softmax_grad_f32, const int *skip, const float *dy, const float *y, float *dx, i64 n, int wide, int accumulate) {
	SKIP();
	softmax_grad(dy, y, dx, n, wide, accumulate);
}

KERNEL(ROW_THREADS, softmax_grad_bf16, const int *skip, const bf16 *dy, const bf16 *y, bf16 *dx, i64 n, int wide, int accumulate) {
	SKIP();
	softmax_grad(dy, y, dx, n, wide, accumulate);
}

KERNEL(ROW_THREADS, softmax_grad_f16, const int *skip, const f16 *dy, const f16 *y, f16 *dx, i64 n, int wide, int accumulate) {
	SKIP();
	softmax_grad(dy, y, dx, n, wide, accumulate);
}

// target_of returns a row's class, −1 where it does not count.
DEVICE int target_of(const int *targets, i64 row, i64 classes, Report *report) {
	int t = targets[row];
	if (t >= -1 && t < classes) return t;
	if (threadIdx.x == 0) wrong(report, row, t);
	return -1;
}

DEVICE float gradient(float x, float lse, float scale, bool hit) { return (expf(x - lse) - (hit ? 1.0f : 0.0f)) * scale; }

DEVICE F4 gradients(F4 v, i64 i, int target, float lse, float scale) {
	v.x = gradient(v.x, lse, scale, i == target);
	v.y = gradient(v.y, lse, scale, i + 1 == target);
	v.z = gradient(v.z, lse, scale, i + 2 == target);
	v.w = gradient(v.w, lse, scale, i + 3 == target);
	return v;
}

DEVICE float gradient_scale(const double *inv_count, const double *loss_scale) { return (float)(*inv_count * *loss_scale); }

// row_loss gets every row's loss, 0 where its target does not count.
KERNEL(ROW_THREADS, cross_entropy, const int *skip, const float *logits, i64 n, int wide, const int *targets, float *lse, double *row_loss, Report *report) {
	SKIP();
	i64 row = blockIdx.x;
	const float *x = logits + row * n;
	float l = log_sum_exp(stats_of_row(x, n, wide));
	int t = target_of(targets, row, n, report);
	if (threadIdx.x == 0) {
		lse[row] = l;
		row_loss[row] = t < 0 ? 0 : (double)l - (double)x[t];
	}
}

KERNEL(ROW_THREADS, cross_entropy_grad, const int *skip, const float *logits, i64 n, int wide, const int *targets, const float *lse, const double *inv_count, const double *loss_scale, float *dlogits, Report *report) {
	SKIP();
	i64 row = blockIdx.x;
	const float *x = logits + row * n;
	float *dx = dlogits + row * n;
	int t = target_of(targets, row, n, report);
	float l = lse[row], scale = gradient_scale(inv_count, loss_scale);
	for (i64 i = 4 * (i64)threadIdx.x; i < n; i += 4 * (i64)blockDim.x) {
		F4 v = four(x, i, n, wide, 0);
		if (t < 0) v.x = v.y = v.z = v.w = 0;
		else v = gradients(v, i, t, l, scale);
		put_four(dx, i, n, wide, v);
	}
}

// head turns a row of logits, rows of which are ld apart, into its loss and, with
// inv_count, its gradient: fp32 in place, 16 bits into the row's first half.
template <class T> DEVICE void head(float *logits, i64 n, i64 ld, const int *targets, i64 first, const double *inv_count, const double *loss_scale, double *row_loss, Report *report) {
	i64 row = blockIdx.x;
	float *x = logits + row * ld;
	float l = log_sum_exp(stats_of_row(x, n, 1));
	int t = target_of(targets, first + row, n, report);
	if (threadIdx.x == 0) row_loss[row] = t < 0 ? 0 : (double)l - (double)x[t];
	if (!inv_count) return;
	float scale = gradient_scale(inv_count, loss_scale);
	__syncthreads();
	for (i64 base = 0; base < n; base += 4 * (i64)blockDim.x) {
		i64 i = base + 4 * (i64)threadIdx.x;
		F4 v;
		v.x = v.y = v.z = v.w = 0;
		if (i < n && t >= 0) v = gradients(four(x, i, n, 1, 0), i, t, l, scale);
		// What follows may lie over what others read here, not over what is read later.
		if (sizeof(T) != sizeof(float)) __syncthreads();
		if (i < n) put_four((T *)x, i, n, 1, v);
	}
}

KERNEL(ROW_THREADS, head_f32, const int *skip, float *logits, i64 n, i64 ld, const int *targets, i64 first, const double *inv_count, const double *loss_scale, double *row_loss, Report *report) {
	SKIP();
	head<float>(logits, n, ld, targets, first, inv_count, loss_scale, row_loss, report);
}

KERNEL(ROW_THREADS, head_bf16, const int *skip, float *logits, i64 n, i64 ld, const int *targets, i64 first, const double *inv_count, const double *loss_scale, double *row_loss, Report *report) {
	SKIP();
	head<bf16>(logits, n, ld, targets, first, inv_count, loss_scale, row_loss, report);
}

KERNEL(ROW_THREADS, head_f16, const int *skip, float *logits, i64 n, i64 ld, const int *targets, i64 first, const double *inv_count, const double *loss_scale, double *row_loss, Report *report) {
	SKIP();
	head<f16>(logits, n, ld, targets, first, inv_count, loss_scale, row_loss, report);
}

// loss_sum adds the rows' losses to the loss, by one block: each thread's rows in
// order, then the threads' sums by a tree.
KERNEL(ROW_THREADS, loss_sum, const int *skip, const double *row_loss, i64 n, double *loss) {
	SKIP();
	SHARED(double, part, ROW_THREADS);
	double s = 0;
	for (i64 i = threadIdx.x; i < n; i += ROW_THREADS) s += row_loss[i];
	part[threadIdx.x] = s;
	for (int half = ROW_THREADS / 2; half > 0; half /= 2) {
		__syncthreads();
		if ((int)threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
	}
	if (threadIdx.x == 0) *loss += part[0];
}
