package nccl

import (
	"errors"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// gather copies every rank's shard to all ranks.
func gather(k *kernel, api driver.API, s driver.Stream) error {
	n := k.In.Len
	switch {
	case n == 0 || k.m.Ranks == 1 && k.InPlace:
		return nil
	case k.m.Ranks == 1:
		return api.CopyOnDevice(k.out, k.in, n, s)
	}
	return k.together(func(api API, c Comm) error { return api.AllGather(k.in, k.out, n, c, s) })
}

// spread copies the root's buffer to all ranks (broadcast).
func spread(k *kernel, _ driver.API, s driver.Stream) error {
	if k.Sig.Bytes == 0 || k.m.Ranks == 1 {
		return nil
	}
	return k.together(func(api API, c Comm) error { return api.Broadcast(k.out, k.Sig.Bytes, k.Sig.Root, c, s) })
}

// exchange sends part i to rank i and receives this rank's part from every rank.
func exchange(k *kernel, api driver.API, s driver.Stream) error {
	n, self := k.Out.Len/int64(k.m.Ranks), int64(k.m.Index)
	if n == 0 {
		return nil
	}
	if err := api.CopyOnDevice(at(k.out, self*n), at(k.in, self*n), n, s); err != nil || k.m.Ranks == 1 {
		return err
	}
	return k.together(func(api API, c Comm) error {
		return k.peers(func(i int) error {
			off := int64(i) * n
			return errors.Join(api.Send(at(k.in, off), n, i, c, s), api.Recv(at(k.out, off), n, i, c, s))
		})
	})
}

// point runs a Send or a Recv.
func point(k *kernel, _ driver.API, s driver.Stream) error {
	if k.Sig.Bytes == 0 {
		return nil
	}
	return k.together(func(api API, c Comm) error {
		if k.Sends() {
			return api.Send(k.in, k.Sig.Bytes, k.Peer, c, s)
		}
		return api.Recv(k.out, k.Sig.Bytes, k.Peer, c, s)
	})
}

// barrier is an all-gather of one word of each rank.
func barrier(k *kernel, _ driver.API, s driver.Stream) error {
	if k.m.Ranks == 1 {
		return nil
	}
	words := at(k.m.r.scratch, k.m.r.w.chunk*int64(k.m.r.w.size))
	own := at(words, barrierSize*int64(k.m.Index))
	return k.together(func(api API, c Comm) error { return api.AllGather(own, words, barrierSize, c, s) })
}

// landing returns the scratch address that receives the chunk of the rank with index i.
func (k *kernel) landing(i int) driver.Address { return at(k.m.r.scratch, int64(i)*k.m.r.w.chunk) }

// add sums n elements of srcs into dst, in the kernel's order. Sources beyond the number that
// one launch can add are split into blocks. In a tree sum the blocks are subtrees: each is
// summed into its first source, then the block sums are added. In a sequential sum the blocks
// are added to dst one after the other. own is the index of the source that is the rank's
// operand rather than scratch, and must not be overwritten.
func (k *kernel) add(api driver.API, s driver.Stream, dst driver.Address, n int64, own int, accumulate bool) error {
	k.dst[0] = dst
	srcs := comm.Addends(&k.Call, k.srcs)
	if len(srcs) <= MostSources {
		return k.sum.Enqueue(api, s, k.dst[:], srcs, n, accumulate)
	}
	if k.Sig.Order == graph.SumSequential {
		for len(srcs) > 0 {
			block := srcs[:min(len(srcs), MostSources)]
			if err := k.sum.Enqueue(api, s, k.dst[:], block, n, accumulate); err != nil {
				return err
			}
			srcs, accumulate = srcs[len(block):], true
		}
		return nil
	}
	bytes := n * k.Sig.DType.Size()
	if own%MostSources == 0 { // the block sum would overwrite the rank's input
		if err := api.CopyOnDevice(k.landing(own), srcs[own], bytes, s); err != nil {
			return err
		}
		srcs[own] = k.landing(own)
	}
	blocks := 0
	for from := 0; from < len(srcs); from += MostSources {
		k.dst[0] = srcs[from]
		if err := k.sum.Enqueue(api, s, k.dst[:], srcs[from:min(len(srcs), from+MostSources)], n, false); err != nil {
			return err
		}
		srcs[blocks] = k.dst[0]
		blocks++
	}
	k.dst[0] = dst
	return k.sum.Enqueue(api, s, k.dst[:], srcs[:blocks], n, accumulate)
}

// scatter receives this rank's part from every rank, a chunk at a time, and adds the chunks
// (reduce-scatter).
func scatter(k *kernel, api driver.API, s driver.Stream) error {
	w, self := k.m.Ranks, k.m.Index
	part, size := k.Sig.Bytes/int64(w), k.Sig.DType.Size()
	if part == 0 || w == 1 && k.InPlace {
		return nil
	}
	wide := k.Out.Len / (part / size) // bytes of an element of the sum
	for from := int64(0); from < part; from += k.m.r.w.chunk {
		n := min(part-from, k.m.r.w.chunk)
		if w > 1 {
			err := k.together(func(api API, c Comm) error {
				return k.peers(func(i int) error {
					return errors.Join(api.Send(at(k.in, int64(i)*part+from), n, i, c, s), api.Recv(k.landing(i), n, i, c, s))
				})
			})
			if err != nil {
				return err
			}
		}
		for i := range k.srcs {
			k.srcs[i] = k.landing(i)
		}
		k.srcs[self] = at(k.in, int64(self)*part+from)
		if err := k.add(api, s, at(k.out, from/size*wide), n/size, self, k.Sig.Accumulate); err != nil {
			return err
		}
	}
	return nil
}

// smallBytes is the largest buffer for which an all-reduce sends every buffer to all ranks.
// Each rank then adds them all in the same order: one exchange instead of two.
const smallBytes = 16 << 10

// reduce sums the rank's share of the buffer over the ranks and sends the sum to all ranks
// (all-reduce).
func reduce(k *kernel, api driver.API, s driver.Stream) error {
	n, w := k.Sig.Bytes, k.m.Ranks
	switch {
	case n == 0 || w == 1:
		return nil
	case n <= min(smallBytes, k.m.r.w.chunk):
		return k.reduceSmall(api, s)
	}
	size := k.Sig.DType.Size()
	share := func(i int) (from, bytes int64) {
		a, b := comm.Share(n/size, int64(i), int64(w))
		return a * size, (b - a) * size
	}
	longest := int64(0)
	for i := range w {
		_, bytes := share(i)
		longest = max(longest, bytes)
	}
	own, ownBytes := share(k.m.Index)
	for from := int64(0); from < longest; from += k.m.r.w.chunk {
		mine := max(0, min(ownBytes-from, k.m.r.w.chunk))
		err := k.together(func(api API, c Comm) error {
			return k.peers(func(i int) error {
				off, bytes := share(i)
				return errors.Join(k.some(api.Send, at(k.out, off+from), min(bytes-from, k.m.r.w.chunk), i, c, s),
					k.some(api.Recv, k.landing(i), mine, i, c, s))
			})
		})
		if err != nil {
			return err
		}
		if mine == 0 {
			continue
		}
		for i := range k.srcs {
			k.srcs[i] = k.landing(i)
		}
		k.srcs[k.m.Index] = at(k.out, own+from)
		if err := k.add(api, s, at(k.out, own+from), mine/size, k.m.Index, false); err != nil {
			return err
		}
	}
	return k.together(func(api API, c Comm) error {
		return k.peers(func(i int) error {
			off, bytes := share(i)
			return errors.Join(k.some(api.Send, at(k.out, own), ownBytes, i, c, s), k.some(api.Recv, at(k.out, off), bytes, i, c, s))
		})
	})
}

// some calls Send or Recv unless bytes is 0. Both sides know the number of bytes.
func (k *kernel) some(call func(driver.Address, int64, int, Comm, driver.Stream) error, a driver.Address, bytes int64, peer int, c Comm, s driver.Stream) error {
	if bytes <= 0 {
		return nil
	}
	return call(a, bytes, peer, c, s)
}

// reduceSmall is an all-reduce in which every rank gathers all buffers and adds them.
func (k *kernel) reduceSmall(api driver.API, s driver.Stream) error {
	n := k.Sig.Bytes
	err := k.together(func(api API, c Comm) error { return api.AllGather(k.out, k.m.r.scratch, n, c, s) })
	if err != nil {
		return err
	}
	for i := range k.srcs {
		k.srcs[i] = at(k.m.r.scratch, int64(i)*n)
	}
	return k.add(api, s, k.out, n/k.Sig.DType.Size(), -1, false)
}

// rehearse runs every kind of call once on each communicator, so that NCCL creates its
// connections and allocates their memory now instead of in the first step. It sets took to
// that memory, in bytes.
func (r *rank) rehearse() error {
	if r.w.size == 1 {
		return nil
	}
	api := r.ctx.Driver()
	s, err := api.NewStream()
	if err != nil {
		return err
	}
	for _, m := range r.members {
		if m.comm == nil || m.Ranks == 1 || m.slot > 0 && m.comm == r.world {
			continue
		}
		k := &kernel{m: m, text: "the first calls of " + m.name}
		a := at(r.scratch, r.w.chunk*int64(r.w.size))
		err = errors.Join(err, k.together(func(api API, c Comm) error {
			return k.peers(func(i int) error {
				return errors.Join(api.Send(at(a, barrierSize*int64(m.Index)), barrierSize, i, c, s), api.Recv(at(a, barrierSize*int64(i)), barrierSize, i, c, s))
			})
		}))
		if err == nil {
			err = barrier(k, api, s)
		}
		if err == nil {
			err = k.together(func(api API, c Comm) error { return api.Broadcast(a, barrierSize, 0, c, s) })
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		err = r.drain(api, s)
	}
	err = errors.Join(err, api.DestroyStream(s))
	free, _, e := api.MemInfo()
	r.took = max(0, r.took-free)
	return errors.Join(err, e)
}
