// Command codec measures what compression would do to the classes that rest on
// disk: how much shorter blocks get, and how fast one thread codes them. The
// states are a checkpoint's of a GPT-2; the activations are those that its first
// block keeps for the backward, computed here on the bytes of a file.
//
//	spillway train --zero 0 --ranks 1 --device-memory 1GiB --steps 300 --checkpoint ./ck
//	go run ./benchmarks/disk/codec -checkpoint ck/step-00000300 -text FILE [-block BYTES]
package main

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/offload/store"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "codec:", err)
		os.Exit(1)
	}
}

func run() error {
	dir := flag.String("checkpoint", "", "folder of one checkpoint of a GPT-2 on bytes")
	text := flag.String("text", "", "file whose bytes are the tokens")
	block := flag.Int("block", store.DefaultBlock, "bytes that are compressed at a time")
	flag.Parse()
	if *dir == "" || *text == "" {
		return errors.New("-checkpoint and -text are needed")
	}
	params, err := tensors(filepath.Join(*dir, "model.safetensors"))
	if err != nil {
		return err
	}
	classes := []struct {
		name string
		data []byte
	}{{"parameters", flat(params)}}
	for _, moment := range []string{"exp_avg", "exp_avg_sq"} {
		m, err := tensors(filepath.Join(*dir, moment+".safetensors"))
		if err != nil {
			return err
		}
		classes = append(classes, struct {
			name string
			data []byte
		}{moment, flat(m)})
	}
	tokens, err := os.ReadFile(*text)
	if err != nil {
		return err
	}
	acts, err := activations(params, tokens)
	if err != nil {
		return err
	}
	for _, a := range acts {
		classes = append(classes, struct {
			name string
			data []byte
		}{"activations: " + a.name, bytesOf(a.v)})
	}
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false))
	if err != nil {
		return err
	}
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	fmt.Printf("%-32s %-5s %8s %12s %12s\n", "class", "codec", "stored", "encode GB/s", "decode GB/s")
	for _, c := range classes {
		for _, codec := range []struct {
			name           string
			encode, decode func(dst, src []byte) ([]byte, error)
		}{
			{"s2", func(d, s []byte) ([]byte, error) { return s2.Encode(d, s), nil }, func(d, s []byte) ([]byte, error) { return s2.Decode(d, s) }},
			{"zstd", func(d, s []byte) ([]byte, error) { return encoder.EncodeAll(s, d[:0]), nil }, func(d, s []byte) ([]byte, error) { return decoder.DecodeAll(s, d[:0]) }},
		} {
			stored, enc, dec, err := measure(c.data, *block, codec.encode, codec.decode)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", c.name, codec.name, err)
			}
			fmt.Printf("%-32s %-5s %7.1f%% %12.2f %12.2f\n", c.name, codec.name, 100*stored, enc/1e9, dec/1e9)
		}
	}
	return nil
}

// measure codes data block by block for about half a second in all. A block
// counts as the pages that the store would write, or as a whole where it does
// not get a page shorter.
func measure(data []byte, block int, encode, decode func(dst, src []byte) ([]byte, error)) (stored, enc, dec float64, err error) {
	dst, back := make([]byte, s2.MaxEncodedLen(block)), make([]byte, block)
	var encTime, decTime time.Duration
	var total, out int
	for first := true; first || encTime+decTime < 500*time.Millisecond; first = false {
		for at := 0; at < len(data); at += block {
			src := data[at:min(at+block, len(data))]
			start := time.Now()
			e, err := encode(dst, src)
			if err != nil {
				return 0, 0, 0, err
			}
			encTime += time.Since(start)
			start = time.Now()
			b, err := decode(back, e)
			decTime += time.Since(start)
			if err != nil || len(b) != len(src) {
				return 0, 0, 0, fmt.Errorf("decoded %d bytes of %d: %w", len(b), len(src), err)
			}
			pages := (len(e) + store.Page - 1) / store.Page * store.Page
			total, out = total+len(src), out+min(pages, len(src))
		}
	}
	return float64(out) / float64(total), float64(total) / encTime.Seconds(), float64(total) / decTime.Seconds(), nil
}

type tensor struct {
	name  string
	shape []int64
	v     []float32
}

func tensors(path string) (list []tensor, err error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, t := range f.Tensors() {
		v := make([]float32, t.Elements())
		if err := f.ReadFloat32(t.Name, 0, v); err != nil {
			return nil, err
		}
		list = append(list, tensor{t.Name, t.Shape, v})
	}
	return list, nil
}

func bytesOf(v []float32) []byte {
	b := make([]byte, 4*len(v))
	for i, x := range v {
		binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(x))
	}
	return b
}

func flat(list []tensor) (b []byte) {
	for _, t := range list {
		b = append(b, bytesOf(t.v)...)
	}
	return b
}

// activations returns what the first block keeps of rows of up to 256 tokens,
// 4096 tokens in all: (tokens, width) each.
func activations(params []tensor, text []byte) ([]tensor, error) {
	find := func(name string) (tensor, error) {
		for _, t := range params {
			if t.name == name || t.name == "transformer."+name {
				return t, nil
			}
		}
		return tensor{}, fmt.Errorf("the checkpoint has no %s", name)
	}
	var p [8]tensor
	for i, name := range []string{"wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias", "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias"} {
		var err error
		if p[i], err = find(name); err != nil {
			return nil, err
		}
	}
	width, row := int(p[0].shape[1]), int(min(256, p[1].shape[0]))
	n := min(len(text), 4096)
	x, norm := make([]float32, n*width), make([]float32, n*width)
	for t := range n {
		var sum, squares float64
		for j := range width {
			v := p[0].v[int(text[t])*width+j] + p[1].v[t%row*width+j]
			x[t*width+j] = v
			sum += float64(v)
			squares += float64(v) * float64(v)
		}
		mean := sum / float64(width)
		inv := 1 / math.Sqrt(squares/float64(width)-mean*mean+1e-5)
		for j := range width {
			norm[t*width+j] = float32((float64(x[t*width+j])-mean)*inv)*p[2].v[j] + p[3].v[j]
		}
	}
	linear := func(w, b tensor) []float32 {
		out := int(w.shape[1])
		y := make([]float32, n*out)
		for t := range n {
			to := y[t*out:][:out]
			copy(to, b.v)
			for k := range width {
				for j, wv := range w.v[k*out:][:out] {
					to[j] += norm[t*width+k] * wv
				}
			}
		}
		return y
	}
	qkv, fc := linear(p[4], p[5]), linear(p[6], p[7])
	gelu := make([]float32, len(fc))
	for i, v := range fc {
		gelu[i] = float32(0.5 * float64(v) * (1 + math.Tanh(0.7978845608*(float64(v)+0.044715*float64(v)*float64(v)*float64(v)))))
	}
	return []tensor{{"residual", nil, x}, {"ln_1", nil, norm}, {"qkv", nil, qkv}, {"mlp, before gelu", nil, fc}, {"mlp, after gelu", nil, gelu}}, nil
}
