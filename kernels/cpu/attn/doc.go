// Package attn is causal and non-causal multi-head and grouped-query attention
// on the CPU, forward and backward, with a streaming softmax: the T×T scores
// never exist, only one tile of them at a time.
//
// Sources: the tiling, the backward pass that recomputes the probabilities from
// the row's log-sum-exp, and delta = rowsum(dy·y) are FlashAttention-2's (Dao,
// "FlashAttention-2: Faster Attention with Better Parallelism and Work
// Partitioning", arXiv:2307.08691, §3.1); the running maximum and sum are
// Milakov and Gimelshein's ("Online normalizer calculation for softmax",
// arXiv:1805.02867); grouped queries are Ainslie et al.'s ("GQA",
// arXiv:2305.13245).
//
// # Layout
//
// B sequences, Tq queries and Tk keys in each, H query heads over KV key/value
// heads of D channels. Row b·Tq+t of q holds head h at columns [h·D, (h+1)·D);
// rows of k and v hold key/value head h/(H/KV) the same way. Every operand has
// a row stride of its own, so that GPT-2's packed (N, 3C) qkv is three base
// slices into one buffer with stride 3C, and Llama's three buffers are three
// buffers. The queries are the last Tq positions of the Tk keys: query t stands
// at position t+Tk-Tq, and sees keys [0, t+Tk-Tq] if causal, all Tk if not.
//
// # The numbers
//
// The portable code in this package is the definition, and the oracle; SIMD
// code gives the same bits. Nothing below depends on the number of threads, on
// how work is cut, on the batch, or on any row but the ones named, so that row
// t of a long sequence, of a short one, and of a decoding step are equal. fma
// is a fused multiply-add with one rounding, exp is num.Exp.
//
// Forward, for a query q and its n visible keys, in tiles of KeyTile keys
// counted from key 0; acc (D wide) and l (16 lanes) start at +0, m at -Inf:
//
//	s[j]  = scale * (chain of fma over d = 0..D-1 of q[d]·k[j][d], from +0)
//	m'    = max(m, s[j] of the tile);  c = m', or 0 where m' is -Inf
//	α     = exp(m - c)
//	p[j]  = exp(s[j] - c)
//	l[i]  = α·l[i], then + p[j] for the tile's j ≡ i (mod 16), in order
//	acc   = α·acc, then fma(p[j], v[j], acc) for the tile's j in order
//
// then L = the lanes added as a tree (i with i+8, +4, +2, +1), y = acc / L and
// lse = m + log L, rounded once.
//
// Backward, with delta = 16-lane dot product of dy and y over d:
//
//	p  = exp(s - lse)                      s as above
//	dp = chain of fma over d of dy[d]·v[d], from +0
//	ds = (p · (dp - delta)) · scale
//	dq[t] = chain of fma over visible keys j in order of ds·k[j], from +0
//	dv[j] = chain over the queries t that see j, in order, of p·dy[t], from +0
//	dk[j] = chain over the same queries of ds·q[t], from +0
//
// With grouped queries the chains of dk and dv go on from head to head of the
// group, in increasing head order. The 16-lane dot product adds products to
// lane d mod 16 by fma, with d continued to a multiple of 16 by zeros, and the
// lanes as above.
//
// Where sequences hold several documents (Starts) a query sees no key before its
// document's first. Its tiles begin with the one of the first key that the first query
// of its own 64 sees.
//
// A key that a query must not see takes no part: its value is not multiplied
// by zero but not read into the sum at all, so a NaN or Inf there does not
// leak. A NaN or Inf in a visible operand propagates as IEEE arithmetic has
// it. A row all of whose scores are -Inf yields NaN, as a softmax does.
package attn
