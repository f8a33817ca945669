package main

import (
	_ "embed"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

//go:embed products.tsv
var productsTable string

//go:embed terms.tsv
var termsTable string

// lines returns a table's rows, without comments.
func lines(table string, columns int) (rows [][]string, err error) {
	for line := range strings.Lines(table) {
		if line = strings.TrimRight(line, "\n"); line == "" || line[0] == '#' {
			continue
		}
		cells := strings.Split(line, "\t")
		if len(cells) != columns || cells[columns-1] == "" {
			return nil, fmt.Errorf("%q: want %d columns, the last a source", line, columns)
		}
		rows = append(rows, cells)
	}
	return rows, nil
}

// term is a figure of the card with its source.
type term struct {
	name, unit, source string
	value              float64
}

// timed is a published time of a product.
type timed struct {
	bits              int
	card, source      string
	batch, m, n, k    int64
	seconds, expected float64
}

// rates are the card's properties that the estimate uses. The time of a product is a model fitted
// to published times: a tile has a time for its beginning and end and one for each step along K,
// all multiprocessors process a tile at a time, and a call has a fixed time. The fit minimizes each
// row's squared relative error; none of the three times is chosen by hand.
type rates struct {
	terms    []term
	of       map[string]float64
	products []timed
	fits     map[int][3]float64 // by bits: seconds of a call, of a wave, of a wave's step along K
}

func readRates() (*rates, error) {
	r := &rates{of: map[string]float64{}, fits: map[int][3]float64{}}
	rows, err := lines(termsTable, 4)
	if err != nil {
		return nil, fmt.Errorf("terms.tsv: %w", err)
	}
	for _, c := range rows {
		v, err := strconv.ParseFloat(c[1], 64)
		if err != nil || !(v > 0) {
			return nil, fmt.Errorf("terms.tsv: %s: %q is no figure", c[0], c[1])
		}
		r.terms, r.of[c[0]] = append(r.terms, term{c[0], c[2], c[3], v}), v
	}
	if rows, err = lines(productsTable, 8); err != nil {
		return nil, fmt.Errorf("products.tsv: %w", err)
	}
	for _, c := range rows {
		var v [6]float64
		for i, cell := range []string{c[0], c[2], c[3], c[4], c[5], c[6]} {
			if v[i], err = strconv.ParseFloat(cell, 64); err != nil || !(v[i] > 0) {
				return nil, fmt.Errorf("products.tsv: %q is no figure", cell)
			}
		}
		r.products = append(r.products, timed{int(v[0]), c[1], c[7], int64(v[1]), int64(v[2]), int64(v[3]), int64(v[4]), v[5] / 1e6, 0})
	}
	for _, bits := range []int{16, 32} {
		if r.fits[bits], err = r.fit(bits); err != nil {
			return nil, err
		}
	}
	for i := range r.products {
		p := &r.products[i]
		p.expected = r.seconds(p.bits, p.batch, p.m, p.n, p.k)
	}
	return r, nil
}

// waves returns the number of rounds in which all multiprocessors process a tile. If there are
// fewer tiles than multiprocessors, a library splits K over the idle ones.
func (r *rates) waves(bits int, batch, m, n int64) float64 {
	rows, cols := r.of[fmt.Sprintf("rows%d", bits)], r.of[fmt.Sprintf("cols%d", bits)]
	w := float64(batch) * math.Ceil(float64(m)/rows) * math.Ceil(float64(n)/cols) / r.of["processors"]
	if w < 1 {
		return w
	}
	return math.Ceil(w)
}

func (r *rates) seconds(bits int, batch, m, n, k int64) float64 {
	w, f := r.waves(bits, batch, m, n), r.fits[bits]
	return f[0] + w*(f[1]+float64(k)*f[2])
}

// fit solves the normal equations. A wave's fixed time below 0 has no meaning: then it is set to 0,
// and the other two are fitted without it.
func (r *rates) fit(bits int) (f [3]float64, err error) {
	for _, use := range [][]int{{0, 1, 2}, {0, 2}} {
		n := len(use)
		s := make([][]float64, n)
		for i := range s {
			s[i] = make([]float64, n+1)
		}
		for _, p := range r.products {
			if p.bits != bits {
				continue
			}
			w := r.waves(bits, p.batch, p.m, p.n)
			all := [3]float64{1 / p.seconds, w / p.seconds, w * float64(p.k) / p.seconds}
			for i, a := range use {
				for j, b := range use {
					s[i][j] += all[a] * all[b]
				}
				s[i][n] += all[a]
			}
		}
		f = [3]float64{}
		for i := range n {
			if s[i][i] == 0 {
				return f, fmt.Errorf("products.tsv: too few rows of %d bits", bits)
			}
			for k := range n {
				if k == i {
					continue
				}
				q := s[k][i] / s[i][i]
				for j := range s[k] {
					s[k][j] -= q * s[i][j]
				}
			}
		}
		for i, a := range use {
			f[a] = s[i][n] / s[i][i]
		}
		if f[1] >= 0 {
			break
		}
	}
	return f, nil
}

// product returns the time of a product of the library: the longer of its arithmetic and its memory
// traffic.
func (r *rates) product(p blas.Product) float64 {
	bits := 16
	if p.A.Type == graph.F32 {
		bits = 32
	}
	return max(r.seconds(bits, 1, p.M, p.N, p.K), productBytes(p)/r.of["memory"])
}
