// Windows of images x (B,H,W,C), channels last, for convolutions and max-pooling.
// A thread takes an element of the result; sums run in the CPU's order.

struct Window {
	i64 b, h, w, c, kh, kw, stride, pad, oh, ow;
};

// origin returns the window position that starts at padded coordinate v, or -1.
DEVICE i64 origin(i64 v, i64 stride, i64 n) {
	if (v < 0 || v % stride != 0 || v / stride >= n) return -1;
	return v / stride;
}

template <class T> DEVICE void im2col(const T *x, T *cols, Window k) {
	i64 width = k.kh * k.kw * k.c, n = k.b * k.oh * k.ow * width;
	for (i64 i = first(); i < n; i += stride()) {
		i64 p = i / width, e = i % width;
		i64 h = p / k.ow % k.oh * k.stride + e / (k.kw * k.c) - k.pad;
		i64 w = p % k.ow * k.stride + e / k.c % k.kw - k.pad;
		bool in = h >= 0 && h < k.h && w >= 0 && w < k.w;
		narrow(cols + i, in ? load(x + ((p / (k.ow * k.oh) * k.h + h) * k.w + w) * k.c + e % k.c) : 0.0f);
	}
}

template <class T> DEVICE void col2im(const T *dcols, T *dx, Window k, int accumulate) {
	i64 n = k.b * k.h * k.w * k.c;
	for (i64 i = first(); i < n; i += stride()) {
		i64 c = i % k.c, w = i / k.c % k.w, h = i / (k.c * k.w) % k.h, b = i / (k.c * k.w * k.h);
		float s = accumulate ? load(dx + i) : 0.0f;
		for (i64 kh = 0; kh < k.kh; kh++) {
			i64 y = origin(h + k.pad - kh, k.stride, k.oh);
			if (y < 0) continue;
			for (i64 kw = 0; kw < k.kw; kw++) {
				i64 x = origin(w + k.pad - kw, k.stride, k.ow);
				if (x >= 0) s += load(dcols + ((((b * k.oh + y) * k.ow + x) * k.kh + kh) * k.kw + kw) * k.c + c);
			}
		}
		narrow(dx + i, s);
	}
}

template <class T> DEVICE void maxpool(const T *x, T *y, Window k) {
	i64 n = k.b * k.oh * k.ow * k.c;
	for (i64 i = first(); i < n; i += stride()) {
		i64 c = i % k.c, ox = i / k.c % k.ow, oy = i / (k.c * k.ow) % k.oh, b = i / (k.c * k.ow * k.oh);
		i64 h0 = oy * k.stride - k.pad, w0 = ox * k.stride - k.pad;
		float best = 0;
		bool some = false;
		for (i64 h = h0 < 0 ? 0 : h0; h < h0 + k.kh && h < k.h; h++) {
			for (i64 w = w0 < 0 ? 0 : w0; w < w0 + k.kw && w < k.w; w++) {
				float v = load(x + ((b * k.h + h) * k.w + w) * k.c + c);
				if (!some || v > best || v != v) best = v;
				some = true;
			}
		}
		narrow(y + i, best);
	}
}

// argmax returns the index in x of the first maximum of a window: its first NaN
// if it has one.
template <class T> DEVICE i64 argmax(const T *x, const Window &k, i64 b, i64 oy, i64 ox, i64 c) {
	i64 best = -1;
	float top = 0;
	for (i64 kh = 0; kh < k.kh; kh++) {
		i64 h = oy * k.stride + kh - k.pad;
		if (h < 0 || h >= k.h) continue;
		for (i64 kw = 0; kw < k.kw; kw++) {
			i64 w = ox * k.stride + kw - k.pad;
			if (w < 0 || w >= k.w) continue;
			i64 at = ((b * k.h + h) * k.w + w) * k.c + c;
			float v = load(x + at);
			if (best < 0 || v > top || (v != v && top == top)) best = at, top = v;
		}
	}
	return best;
}

// maxpool_grad asks every window that holds the pixel whether it is its maximum.
template <class T> DEVICE void maxpool_grad(const T *dy, const T *x, T *dx, Window k, int accumulate) {
	i64 n = k.b * k.h * k.w * k.c;
	for (i64 i = first(); i < n; i += stride()) {
		i64 c = i % k.c, w = i / k.c % k.w, h = i / (k.c * k.w) % k.h, b = i / (k.c * k.w * k.h);
		float s = accumulate ? load(dx + i) : 0.0f;
		i64 y0 = h + k.pad - k.kh + 1, x0 = w + k.pad - k.kw + 1; // the first windows that reach it
		i64 oy = y0 <= 0 ? 0 : (y0 + k.stride - 1) / k.stride;
		i64 first_ox = x0 <= 0 ? 0 : (x0 + k.stride - 1) / k.stride;
		for (; oy < k.oh && oy * k.stride <= h + k.pad; oy++)
			for (i64 ox = first_ox; ox < k.ow && ox * k.stride <= w + k.pad; ox++)
				if (argmax(x, k, b, oy, ox, c) == i) s += load(dy + ((b * k.oh + oy) * k.ow + ox) * k.c + c);
		narrow(dx + i, s);
	}
}

#define CONV(T) \
	KERNEL(256, im2col_##T, const int *skip, const T *x, T *cols, Window k) { \
		SKIP(); \
		im2col(x, cols, k); \
	} \
	KERNEL(256, col2im_##T, const int *skip, const T *dcols, T *dx, Window k, int accumulate) { \
		SKIP(); \
		col2im(dcols, dx, k, accumulate); \
	} \
	KERNEL(256, maxpool_##T, const int *skip, const T *x, T *y, Window k) { \
		SKIP(); \
		maxpool(x, y, k); \
	} \
	KERNEL(256, maxpool_grad_##T, const int *skip, const T *dy, const T *x, T *dx, Window k, int accumulate) { \
		SKIP(); \
		maxpool_grad(dy, x, dx, k, accumulate); \
	}
FOR_FLOATS(CONV)
