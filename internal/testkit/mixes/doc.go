// Package mixes trains pairs of equal runs under random mixes of features and compares their
// results.
package mixes
