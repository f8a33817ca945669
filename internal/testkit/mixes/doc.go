// Package mixes trains the same run twice under random mixes of features and compares
// what it computes.
package mixes
