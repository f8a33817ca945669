// Windows of images x (B,H,W,C), channels last, for convolutions and max-pooling. A thread
// takes as many neighbouring channels of an element of the result as 16 bytes hold (N), or
// one; sums run in the CPU's order. Images are the grid's second dimension, and what an
// image has is counted in 32 bits: see bind_conv.go.

struct Window {
	i64 b, h, w, c, kh, kw, stride, pad, oh, ow;
};

// read and write are of N elements that lie together.
template <int N, class T> DEVICE void read(const T *p, float *v) {
	if constexpr (N > 1) get<N>(p, v);
	else v[0] = load(p);
}
template <int N, class T> DEVICE void write(T *p, const float *v) {
	if constexpr (N > 1) put<N>(p, v);
	else narrow(p, v[0]);
}

// Pixel is a place of an image, and the first of N channels of it.
struct Pixel { int y, x, c; };

// IMAGES walks over the images, ITEMS over N channels each of an image's pixels, which are
// columns side by side.
#define IMAGES(b, k) _Pragma("unroll 1") for (i64 b = blockIdx.y; b < k.b; b += gridDim.y)
#define ITEMS(i, items) _Pragma("unroll 1") for (u32 i = (u32)first(); i < (u32)(items); i += (u32)stride())

DEVICE Pixel pixel_of(u32 i, u32 per, u32 columns, int n) {
	const u32 p = i / per, y = p / columns;
	return {(int)y, (int)(p - y * columns), (int)(i - p * per) * n};
}

// Along is a line of windows, `stride` apart, the first beginning `pad` before the line:
// the last of them that reaches a place, and which of its own places that is. Those
// before it reach it `stride` further in each.
struct Along { int window, in; };
DEVICE Along reaching(int place, int stride, int pad) {
	const int w = (place + pad) / stride;
	return {w, place + pad - w * stride};
}

template <int N, class T> DEVICE void im2col(const T *x, T *cols, const Window &k) {
	const u32 c = (u32)k.c, kw = (u32)k.kw, width = (u32)k.kh * kw * c, items = (u32)(k.oh * k.ow) * (width / N);
	IMAGES(b, k) {
		const T *image = x + b * k.h * k.w * k.c;
		T *out = cols + b * k.oh * k.ow * width;
		ITEMS(i, items) {
			const Pixel p = pixel_of(i, width / N, (u32)k.ow, N);
			const u32 in = (u32)p.c / c, dy = in / kw;
			const i64 h = (i64)p.y * k.stride + dy - k.pad, w = (i64)p.x * k.stride + (in - dy * kw) - k.pad;
			float v[N] = {0};
			if (h >= 0 && h < k.h && w >= 0 && w < k.w) read<N>(image + (h * k.w + w) * k.c + ((u32)p.c - in * c), v);
			write<N>(out + i * N, v);
		}
	}
}

template <int N, class T> DEVICE void col2im(const T *dcols, T *dx, const Window &k, int accumulate) {
	const int c = (int)k.c, kws = (int)k.kw, oh = (int)k.oh, ow = (int)k.ow, stride_ = (int)k.stride, width = (int)k.kh * kws * c;
	const u32 per = (u32)c / N, items = (u32)(k.h * k.w) * per;
	IMAGES(b, k) {
		const T *image = dcols + b * k.oh * k.ow * width;
		T *out = dx + b * k.h * k.w * k.c;
		ITEMS(i, items) {
			const Pixel p = pixel_of(i, per, (u32)k.w, N);
			const Along rows = reaching(p.y, stride_, (int)k.pad), columns = reaching(p.x, stride_, (int)k.pad);
			float s[N] = {0}, v[N];
			if (accumulate) read<N>(out + i * N, s);
#pragma unroll 1
			for (int y = rows.window, kh = rows.in; kh < (int)k.kh && y >= 0; y--, kh += stride_) {
				if (y >= oh) continue;
#pragma unroll 1
				for (int x = columns.window, kw = columns.in; kw < kws && x >= 0; x--, kw += stride_) {
					if (x >= ow) continue;
					read<N>(image + ((y * ow + x) * width + (kh * kws + kw) * c + p.c), v);
#pragma unroll
					for (int j = 0; j < N; j++) s[j] += v[j];
				}
			}
			write<N>(out + i * N, s);
		}
	}
}

template <int N, class T> DEVICE void maxpool(const T *x, T *y, const Window &k) {
	const u32 per = (u32)k.c / N, items = (u32)(k.oh * k.ow) * per;
	IMAGES(b, k) {
		const T *image = x + b * k.h * k.w * k.c;
		T *out = y + b * k.oh * k.ow * k.c;
		ITEMS(i, items) {
			const Pixel p = pixel_of(i, per, (u32)k.ow, N);
			const i64 h0 = (i64)p.y * k.stride - k.pad, w0 = (i64)p.x * k.stride - k.pad;
			float best[N] = {0}, v[N];
			bool some = false;
#pragma unroll 1
			for (i64 h = h0 < 0 ? 0 : h0; h < h0 + k.kh && h < k.h; h++)
#pragma unroll 1
				for (i64 w = w0 < 0 ? 0 : w0; w < w0 + k.kw && w < k.w; w++) {
					read<N>(image + (h * k.w + w) * k.c + p.c, v);
#pragma unroll
					for (int j = 0; j < N; j++)
						if (!some || v[j] > best[j] || v[j] != v[j]) best[j] = v[j];
					some = true;
				}
			write<N>(out + i * N, best);
		}
	}
}

// largest says, a bit for a channel, of which channels a pixel is the first maximum of a
// window that reaches it: the first NaN, where the window has one.
template <int N, class T> DEVICE u32 largest(const T *image, const Window &k, int oy, int ox, const Pixel &p) {
	u32 mine = 0;
	float top[N] = {0}, v[N];
	bool some = false;
#pragma unroll 1
	for (int kh = 0; kh < k.kh; kh++) {
		const i64 h = oy * k.stride + kh - k.pad;
		if (h < 0 || h >= k.h) continue;
#pragma unroll 1
		for (int kw = 0; kw < k.kw; kw++) {
			const i64 w = ox * k.stride + kw - k.pad;
			if (w < 0 || w >= k.w) continue;
			read<N>(image + (h * k.w + w) * k.c + p.c, v);
			const u32 here = h == p.y && w == p.x;
#pragma unroll
			for (int j = 0; j < N; j++)
				if (!some || v[j] > top[j] || (v[j] != v[j] && top[j] == top[j])) {
					top[j] = v[j];
					mine = (mine & ~(1u << j)) | here << j;
				}
			some = true;
		}
	}
	return mine;
}

// maxpool_grad asks every window that holds the pixel whether it is its maximum.
template <int N, class T> DEVICE void maxpool_grad(const T *dy, const T *x, T *dx, const Window &k, int accumulate) {
	const u32 per = (u32)k.c / N, items = (u32)(k.h * k.w) * per;
	IMAGES(b, k) {
		const T *image = x + b * k.h * k.w * k.c, *grads = dy + b * k.oh * k.ow * k.c;
		T *out = dx + b * k.h * k.w * k.c;
		ITEMS(i, items) {
			const Pixel p = pixel_of(i, per, (u32)k.w, N);
			// The first window that reaches it comes after the last that ends before it.
			const int y0 = p.y + (int)k.pad - (int)k.kh, x0 = p.x + (int)k.pad - (int)k.kw;
			const int first_y = y0 < 0 ? 0 : y0 / (int)k.stride + 1, first_x = x0 < 0 ? 0 : x0 / (int)k.stride + 1;
			float s[N] = {0}, v[N];
			if (accumulate) read<N>(out + i * N, s);
#pragma unroll 1
			for (int oy = first_y; oy < k.oh && oy * k.stride <= p.y + k.pad; oy++)
#pragma unroll 1
				for (int ox = first_x; ox < k.ow && ox * k.stride <= p.x + k.pad; ox++) {
					const u32 mine = largest<N>(image, k, oy, ox, p);
					if (mine == 0) continue;
					read<N>(grads + (oy * k.ow + ox) * k.c + p.c, v);
#pragma unroll
					for (int j = 0; j < N; j++)
						if (mine >> j & 1) s[j] += v[j];
				}
			write<N>(out + i * N, s);
		}
	}
}

// WINDOWS calls a function by packs of channels, or channel by channel.
#define WINDOWS(T, f, a, b, ...) \
	if (k.c % (16 / sizeof(T)) == 0 && wide(a, b)) f<16 / sizeof(T)>(__VA_ARGS__); \
	else f<1>(__VA_ARGS__);

#define CONV(T) \
	KERNEL(256, im2col_##T, const int *skip, const T *x, T *cols, Window k) { \
		SKIP(); \
		WINDOWS(T, im2col, x, cols, x, cols, k) \
	} \
	KERNEL(256, col2im_##T, const int *skip, const T *dcols, T *dx, Window k, int accumulate) { \
		SKIP(); \
		WINDOWS(T, col2im, dcols, dx, dcols, dx, k, accumulate) \
	} \
	KERNEL(256, maxpool_##T, const int *skip, const T *x, T *y, Window k) { \
		SKIP(); \
		WINDOWS(T, maxpool, x, y, x, y, k) \
	} \
	KERNEL(256, maxpool_grad_##T, const int *skip, const T *dy, const T *x, T *dx, Window k, int accumulate) { \
		SKIP(); \
		if (!wide(dy)) maxpool_grad<1>(dy, x, dx, k, accumulate); \
		else WINDOWS(T, maxpool_grad, x, dx, dy, x, dx, k, accumulate) \
	}
FOR_FLOATS(CONV)
